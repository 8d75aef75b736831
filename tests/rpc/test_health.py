"""Health, as probes, watchers and balancers see it (R15, R16)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.rpc.servers import Running, failure_of, running
from tests.rpc.services import SERVICE, Behaviours, Context

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING
NAMES = ["", SERVICE]


async def check(server: Running, name: str = "") -> int:
    response: HealthCheckResponse = await server.health.Check(HealthCheckRequest(service=name))
    return response.status


@pytest.mark.parametrize("name", NAMES)
async def test_health_follows_the_server_through_its_life(name: str) -> None:
    async with running(is_serving=False) as server:
        assert await check(server, name) == NOT_SERVING
        await server.server.set_serving()
        assert await check(server, name) == SERVING
        drain = asyncio.create_task(server.server.drain(notice_seconds=0.2, grace_seconds=1))
        await asyncio.sleep(0.05)
        assert await check(server, name) == NOT_SERVING
        # During the notice calls are still served: not everyone has noticed.
        assert (await server.unary("Answer")).input_tokens == 1
        await drain


async def test_a_service_that_nobody_knows_is_not_found() -> None:
    async with running() as server:
        assert (await failure_of(server.health.Check(HealthCheckRequest(service="nope")))).code == "NOT_FOUND"


async def test_watchers_see_every_change_and_then_the_end() -> None:
    """K05: a watcher that never leaves does not hold the drain until the end of its grace."""
    async with running(is_serving=False) as server:
        watch = server.health.Watch(HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        await server.server.set_serving()
        assert (await watch.read()).status == SERVING
        async with asyncio.timeout(2):
            await server.server.drain(notice_seconds=0.05, grace_seconds=30)
        assert (await watch.read()).status == NOT_SERVING
        assert (await failure_of(watch)).code == "UNAVAILABLE"


async def test_health_answers_while_calls_queue_up() -> None:
    """R16, R14: fifty waiting calls are nothing to a probe."""

    async def wait(_context: Context) -> None:
        await asyncio.Event().wait()

    async with running(Behaviours(on_call=wait)) as server:
        calls = [asyncio.ensure_future(server.unary("Answer")) for _ in range(50)]
        async with asyncio.timeout(1):
            assert await check(server) == SERVING
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_reflection_names_the_services_when_it_is_on() -> None:
    async with running(reflection=True) as server:
        assert await reflected(server) >= {SERVICE, "grpc.health.v1.Health"}
    async with running() as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await reflected(server)


async def test_probes_need_no_tenant() -> None:
    async with running(tenant_metadata="x-tenant", require_tenant=True, reflection=True) as server:
        assert await check(server) == SERVING
        assert SERVICE in await reflected(server)
        assert (await failure_of(server.unary("Answer"))).reason == "TENANT_REQUIRED"


async def reflected(server: Running) -> set[str]:
    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    channel: Any = server.channel  # the stub's annotation knows blocking channels only
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = [answer async for answer in stub.ServerReflectionInfo(requests())]
    return {service.name for answer in answers for service in answer.list_services_response.service}
