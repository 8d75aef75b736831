"""What happens around every call: errors become statuses, deadlines end, spans and metrics are made.

One interceptor of our own, because it must get right what the ready-made instrumentation does not:
handlers that use `context.write`, failed calls, and cancelled streams. Whatever form a streaming handler
has, its messages are written from one coroutine: a cancelled call then closes the handler's generator at
once and in its own context, so that slots are freed and spans end in the right trace.
"""

from __future__ import annotations  # RpcMethodHandler has no [] at run time

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc.aio
from grpc_status import rpc_status

from shared.errors import DeadlineExceeded, Draining, NotReady
from shared.rpc.call import Call, RunningCalls
from shared.rpc.observation import UNKNOWN_METHOD, MethodName, count_unknown_method, observed
from shared.rpc.status import status_of
from shared.rpc.tenant import read_tenant

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Work = Callable[[], Awaitable[Any]]

# Neither observed nor limited in time: probes come every second, and watchers stay.
_QUIET_SERVICES = ("grpc.health.", "grpc.reflection.")

_MAKE_HANDLER: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Stands around every handler of a server.

    Until `is_ready`, all calls but those of health and reflection are refused with UNAVAILABLE. Calls
    without a deadline get the default one; later deadlines than the longest are cut to it.
    """

    def __init__(
        self,
        *,
        default_deadline_seconds: float,
        max_deadline_seconds: float,
        tenant_metadata: str = "",
        require_tenant: bool = False,
    ) -> None:
        self.is_ready = False
        self.calls = RunningCalls()
        self._default_deadline = min(default_deadline_seconds, max_deadline_seconds)
        self._max_deadline = max_deadline_seconds
        self._tenant_metadata = tenant_metadata
        self._require_tenant = require_tenant

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        name = MethodName.parse(handler_call_details.method)
        is_quiet = name.service.startswith(_QUIET_SERVICES)
        if not self.is_ready and not is_quiet:
            return self._wrap(UNKNOWN_METHOD if handler is None else name, _REFUSING)
        if handler is not None:
            return self._wrap(name, handler, is_quiet=is_quiet)
        count_unknown_method()
        return None

    def _wrap(self, name: MethodName, handler: Handler, *, is_quiet: bool = False) -> Handler:
        behaviour = _behaviour_of(handler)
        answer = self._answer_quietly if is_quiet else partial(self._answer, name)

        async def respond(request: Any, context: Context) -> Any:
            return await answer(context, lambda: behaviour(request, context))

        async def respond_with_stream(request: Any, context: Context) -> None:
            await answer(context, lambda: _write_all(behaviour(request, context), context))

        make_handler = _MAKE_HANDLER[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make_handler(
            respond_with_stream if handler.response_streaming else respond,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _answer(self, name: MethodName, context: Context, work: Work) -> Any:
        with observed(name, context) as observation:
            try:
                metadata = context.invocation_metadata() or ()
                tenant = read_tenant(metadata, self._tenant_metadata, is_required=self._require_tenant)
                return await self._work_in_time(context, work, tenant)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  whatever it is, the caller gets a status
                observation.error = error
                await _abort(context, error)

    async def _answer_quietly(self, context: Context, work: Work) -> Any:
        call = Call(deadline=math.inf, tenant="", timeout=asyncio.timeout(None), is_quiet=True)
        try:
            async with call.timeout:
                with self.calls.entered(call):
                    return await work()
        except TimeoutError as error:
            await _abort(context, _reason_of(call, error))

    async def _work_in_time(self, context: Context, work: Work, tenant: str) -> Any:
        given: float | None = context.time_remaining()
        seconds = min(self._default_deadline if given is None else given, self._max_deadline)
        # gRPC itself cancels the handler at the caller's deadline. A second cancellation could hit a
        # handler that is already cleaning up, so only our own limits get a timer.
        deadline = asyncio.get_running_loop().time() + seconds
        timeout = asyncio.timeout_at(None if seconds == given else deadline)
        call = Call(deadline=deadline, tenant=tenant, timeout=timeout)
        try:
            async with timeout:
                with self.calls.entered(call):
                    return await work()
        except TimeoutError as error:
            raise _reason_of(call, error) from None


async def _abort(context: Context, error: Exception) -> None:
    try:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))
    except grpc.aio.InternalError:
        # A caller who does not read has a message in flight, behind which no status can go. Without one
        # gRPC cancels the call.
        raise asyncio.CancelledError from error


def _reason_of(call: Call, error: TimeoutError) -> Exception:
    """What a TimeoutError out of a handler means: our own timer, a drain, or a fault of the handler."""
    if not call.timeout.expired():
        return error
    if call.is_draining:
        return Draining("this server shuts down; call again")
    return DeadlineExceeded("the time of this call is used up")


def _behaviour_of(handler: Handler) -> Callable[[Any, Context], Any]:
    behaviours: tuple[Any, ...] = (
        handler.unary_unary,
        handler.unary_stream,
        handler.stream_unary,
        handler.stream_stream,
    )
    found: Callable[[Any, Context], Any] = next(filter(None, behaviours))
    return found


async def _write_all(answer: Any, context: Context) -> None:
    """Sends what a streaming handler makes: a generator's messages; one with context.write just runs."""
    if not inspect.isasyncgen(answer):
        await answer
        return
    async with aclosing(answer) as messages:
        async for message in messages:
            await context.write(message)


async def _refuse(_requests: Any, _context: Context) -> None:
    raise NotReady("this server does not serve yet; call again")


# Of the widest shape: it fits callers of every kind, and reads nothing.
_REFUSING: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
