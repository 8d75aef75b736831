"""How much time a call has left; every wait below a servicer is bounded by it."""

import asyncio
from typing import Any

import grpc.aio

from shared.rpc.call import current_call


def remaining_seconds(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Seconds until the call ends, never negative, never infinite.

    The caller's deadline, or the server's default where the caller set none, cut to the server's longest.
    """
    remaining = current_call.get().deadline - asyncio.get_running_loop().time()
    given = context.time_remaining()
    # Without a deadline grpc.aio says None, whatever its annotation promises.
    return max(0.0, remaining if given is None else min(remaining, given))
