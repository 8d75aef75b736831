"""Message sizes and pings: settings of both sides that must agree (R01, R11)."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from lenspair_client.options import ClientOptions, channel_options
from shared.rpc.server import MIN_PING_INTERVAL_SECONDS
from shared.settings import SharedSettings
from tests.rpc.servers import Running, failure_of, running
from tests.rpc.services import SERVICE, delta

MIB = 1024 * 1024
RAISED = [("grpc.max_receive_message_length", 8 * MIB), ("grpc.max_send_message_length", 8 * MIB)]


async def echo(server: Running, size: int) -> Any:
    """The same message there and back."""
    return await server.echo([delta("x" * size)]).read()


async def test_five_megabytes_pass_both_ways_with_the_default_settings() -> None:
    async with running(channel_options=channel_options(SERVICE, ClientOptions())) as server:
        assert len((await echo(server, 5 * MIB)).delta.text) == 5 * MIB


@pytest.mark.parametrize(
    ("server_mib", "options", "who"),
    [(8, [], "CLIENT: Received"), (2, RAISED, "SERVER: Received"), (2, [RAISED[0]], "SERVER: Received")],
)
async def test_a_limit_on_one_side_alone_names_side_and_limit(
    server_mib: int, options: list[tuple[str, int]], who: str
) -> None:
    async with running(channel_options=options, max_message_bytes=server_mib * MIB) as server:
        failure = await failure_of(server.echo([delta("x" * 5 * MIB)]))
    assert failure.code == "RESOURCE_EXHAUSTED"
    assert who in failure.message
    assert str(min(server_mib, 4) * MIB) in failure.message


def test_client_and_server_have_the_same_message_limit() -> None:
    assert SharedSettings.model_fields["max_message_bytes"].default == ClientOptions().max_message_bytes


def test_the_client_pings_less_often_than_the_server_allows() -> None:
    assert ClientOptions().keepalive_seconds >= 2 * MIN_PING_INTERVAL_SECONDS


# The shortest interval that gRPC's client keeps; the fourth ping is one too many for a strict server.
PINGS = list(channel_options(SERVICE, ClientOptions(keepalive_seconds=1.0)))
SECONDS = 7.0


async def outlives_a_silent_call(server: Running) -> bool:
    """True when a call that says nothing for a while ends by its own deadline."""
    return (await failure_of(server.unary("Hang", seconds=SECONDS))).code == "DEADLINE_EXCEEDED"


async def outlives_idleness(server: Running) -> bool:
    """True when a connection without calls stays."""
    async with grpc.aio.insecure_channel(server.address, options=PINGS) as channel:
        await channel.channel_ready()
        try:
            async with asyncio.timeout(SECONDS):
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        except TimeoutError:
            return True
        return False


async def outlives_pings(allowed_seconds: float) -> tuple[bool, bool]:
    """What stays at a server that allows a ping in so many seconds: a silent call, an idle connection."""
    options = {"min_ping_interval_seconds": allowed_seconds}
    async with running(channel_options=PINGS, server_options=options) as server:
        silent, idle = await asyncio.gather(outlives_a_silent_call(server), outlives_idleness(server))
    return silent, idle


async def test_a_server_bears_the_pings_that_it_allows_and_no_more() -> None:
    """R11: no GOAWAY in silence or idleness; and the option that says so acts."""
    patient, strict = await asyncio.gather(outlives_pings(0.5), outlives_pings(60.0))
    assert patient == (True, True)
    assert strict == (False, False)
