"""What callers see of every way in which a call can go, whatever the shape of its handler."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from shared.errors import FeatureNotFound, InvalidSampling, QueueFull
from shared.features.key import tenant_tag
from shared.pb.lenspair.decoder.v1.decoder_pb2 import CountTokensRequest
from shared.rpc.deadline import remaining_seconds
from shared.rpc.server import RpcServer
from shared.rpc.tenant import tenant_of
from tests.rpc.servers import Failure, failure_of, running, settings, texts_of
from tests.rpc.services import SERVICE, Behaviours, Context, delta

INTERNAL = Failure("INTERNAL", "INTERNAL", "", "internal error of the server; its log has the details")
NOT_READY = ("UNAVAILABLE", "NOT_READY")


async def test_answers_of_every_shape_pass() -> None:
    async with running() as server:
        assert (await server.unary("Answer")).input_tokens == 1
        assert await texts_of(server.stream("Stream")) == ["a", "b", "c"]
        assert await texts_of(server.stream("Write")) == ["a", "b", "c"]
        assert (await server.collect([CountTokensRequest()] * 3)).input_tokens == 3
        assert await texts_of(server.echo([delta("x"), delta("y")])) == ["x", "y"]


async def test_an_error_becomes_its_status() -> None:
    async with running(Behaviours(error=InvalidSampling("too hot", field="task.sampling"))) as server:
        expected = Failure("INVALID_ARGUMENT", "INVALID_SAMPLING", "task.sampling", "too hot")
        assert await failure_of(server.unary("Fail")) == expected
        assert await failure_of(server.stream("StreamThenFail")) == expected


async def test_an_unknown_error_is_internal_and_says_nothing() -> None:
    async with running(Behaviours(error=KeyError("a secret"))) as server:
        assert await failure_of(server.unary("Fail")) == INTERNAL
        assert await failure_of(server.stream("StreamThenFail")) == INTERNAL


async def test_a_timeout_error_of_the_handler_is_no_deadline() -> None:
    async with running(Behaviours(error=TimeoutError("a secret"))) as server:
        assert await failure_of(server.unary("Fail")) == INTERNAL


async def test_an_abort_of_the_handler_passes_as_it_is() -> None:
    async with running() as server:
        assert await failure_of(server.unary("Abort")) == Failure(
            "ALREADY_EXISTS", "", "", "an abort of the handler's own"
        )


async def test_an_error_with_a_very_long_text_keeps_its_code() -> None:
    """R04."""
    many_keys = Behaviours(error=FeatureNotFound(["k" * 194] * 1000))
    long_text = Behaviours(error=InvalidSampling("語" * 20_000, field="x" * 20_000))
    async with running(many_keys) as server:
        assert (await failure_of(server.unary("Fail"))).reason == "FEATURE_NOT_FOUND"
    async with running(long_text) as server:
        assert (await failure_of(server.unary("Fail"))).code == "INVALID_ARGUMENT"


async def test_an_unknown_method_is_unimplemented() -> None:
    async with running() as server:
        assert (await failure_of(server.unary("Nope"))).code == "UNIMPLEMENTED"


async def test_a_cancelled_stream_closes_its_generator_at_once() -> None:
    """R06: no step is made for a caller who has gone."""
    async with running() as server:
        call = server.stream("StreamForever")
        for _ in range(3):
            await call.read()
        call.cancel()
        async with asyncio.timeout(1):
            await server.behaviours.ended.wait()
        # One task drives the generator from its first step to its end.
        assert len(set(server.behaviours.seen)) == 1


async def test_a_cancelled_call_stops_its_handler() -> None:
    async with running() as server:
        call = server.unary("Hang")
        async with asyncio.timeout(1):
            await server.behaviours.started.wait()
            call.cancel()
            await server.behaviours.ended.wait()


async def test_a_call_without_deadline_gets_the_default() -> None:
    """R13."""
    async with running(default_deadline_seconds=0.1) as server:
        expected = Failure("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "", "the time of this call is used up")
        assert await failure_of(server.unary("Hang")) == expected
        assert await failure_of(server.stream("StreamThenHang")) == expected
        assert server.behaviours.ended.is_set()


async def test_a_deadline_beyond_the_longest_is_cut() -> None:
    async with running(max_deadline_seconds=0.1) as server:
        assert (await failure_of(server.unary("Hang", seconds=60))).reason == "DEADLINE_EXCEEDED"


async def test_work_stops_at_the_callers_deadline() -> None:
    """R13; a handler that cleans up at its deadline is not cancelled a second time."""
    async with running(Behaviours(clean_up_seconds=0.2)) as server:
        assert (await failure_of(server.unary("Hang", seconds=0.1))).code == "DEADLINE_EXCEEDED"
        async with asyncio.timeout(2):
            await server.behaviours.ended.wait()


async def test_a_caller_who_does_not_read_is_cut_off_in_time() -> None:
    """No status fits behind a message that waits for its reader; the call still ends, on both sides."""
    async with running(default_deadline_seconds=0.2) as server:
        call = server.stream("Flood")
        async with asyncio.timeout(2):
            await server.behaviours.ended.wait()
            assert (await failure_of(call)).code in ("CANCELLED", "DEADLINE_EXCEEDED")


@pytest.mark.parametrize(
    ("given", "at_most"), [(None, 5.0), (3.0, 3.0), (3600.0, 7.0)], ids=["default", "given", "longest"]
)
async def test_handlers_see_what_remains(given: float | None, at_most: float) -> None:
    """R13: every step below gets less."""
    seen: list[float] = []

    async def note(context: Context) -> None:
        seen.append(remaining_seconds(context))
        await asyncio.sleep(0.02)
        # In a task of its own too: the call travels with the context.
        seen.append(await asyncio.create_task(remaining(context)))

    async def remaining(context: Context) -> float:
        return remaining_seconds(context)

    limits: dict[str, Any] = {"default_deadline_seconds": 5.0, "max_deadline_seconds": 7.0}
    async with running(Behaviours(on_call=note), **limits) as server:
        await server.unary("Answer", seconds=given)
    first, second = seen
    # On the wire a deadline is rounded up to a few digits.
    assert at_most - 1.5 < first <= at_most + 0.05
    assert 0 < second <= first - 0.019


async def test_the_tenant_is_the_one_in_the_metadata() -> None:
    seen: list[str] = []

    async def note(context: Context) -> None:
        seen.append(tenant_of(context))

    async with running(Behaviours(on_call=note), tenant_metadata="X-Tenant") as server:
        await server.unary("Answer", metadata=(("x-tenant", "shop"),))
        await server.unary("Answer")
        refused = await failure_of(server.unary("Answer", metadata=(("x-tenant", "two words"),)))
    assert seen == [tenant_tag("shop"), tenant_tag("")]
    assert (refused.reason, refused.field) == ("INVALID_REQUEST", "metadata.X-Tenant")


async def test_where_a_tenant_is_required_calls_of_every_shape_need_one() -> None:
    async with running(tenant_metadata="x-tenant", require_tenant=True) as server:
        for call in (server.unary("Answer"), server.stream("Stream"), server.collect([CountTokensRequest()])):
            refused = await failure_of(call)
            assert (refused.code, refused.reason) == ("UNAUTHENTICATED", "TENANT_REQUIRED")
            assert refused.field == "metadata.x-tenant"
        assert await server.unary("Answer", metadata=(("x-tenant", "shop"),))


async def test_before_it_is_ready_a_server_refuses_calls_of_every_shape() -> None:
    async with running(is_serving=False) as server:
        calls = [
            server.unary("Answer"),
            server.unary("Nope"),
            server.stream("Stream"),
            server.collect([CountTokensRequest()]),
            server.echo([delta("x")]),
        ]
        for call in calls:
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == NOT_READY


async def test_a_full_queue_sends_its_hint() -> None:
    async with running(Behaviours(error=QueueFull("full", retry_after_seconds=0.5))) as server:
        assert (await failure_of(server.unary("Fail"))).code == "RESOURCE_EXHAUSTED"


async def test_services_may_be_added_to_a_running_server() -> None:
    """A model takes minutes to load; health answers from the first second on."""
    server = RpcServer(settings(), [SERVICE])
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/Answer")
        assert (await failure_of(call(b""))).reason == "NOT_READY"
        server.add(Behaviours().register)
        await server.set_serving()
        assert await call(b"")
    await server.drain(notice_seconds=0, grace_seconds=0)
