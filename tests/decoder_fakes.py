"""An engine that says what it is told to; an ordinary class behind the Engine protocol."""

import asyncio
import time
from collections.abc import AsyncGenerator

from decoder_service.engine.engine import (
    Candidate,
    EngineStats,
    GenerationRequest,
    RequestTimings,
    TokenOutput,
)
from shared.errors import LenspairError


class ScriptedEngine:
    """Yields the tokens of `script` for every request, one at a time while `gate` is open.

    `requests` keeps what was asked, `abandoned` counts readers that left early, and `error` is raised
    before the first token.
    """

    context_tokens = 512

    def __init__(self) -> None:
        self.script: tuple[int, ...] = ()
        self.requests: list[GenerationRequest] = []
        self.abandoned = 0
        self.error: LenspairError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self, request: GenerationRequest, timings: RequestTimings
    ) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        timings.submitted = timings.first_scheduled = time.monotonic()
        if self.error is not None:
            raise self.error
        is_done = False
        try:
            for token_id in self.script[len(request.continuation) :]:
                await self.gate.wait()
                timings.first_token = timings.first_token or time.monotonic()
                yield TokenOutput(token_id, logprob=-0.5, top=(Candidate(token_id, -0.5),))
            yield TokenOutput(None, finish="stop")
            is_done = True
        finally:
            self.abandoned += not is_done

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 1)

    async def close(self) -> None:
        """Nothing to close."""
