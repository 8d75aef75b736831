"""An engine that says what it is told to, and other parts of a decoder without a model."""

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import cache

from decoder_service.engine.engine import (
    Candidate,
    EngineStats,
    GenerationRequest,
    RequestTimings,
    TokenOutput,
)
from decoder_service.grammars import Grammars
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.errors import LenspairError
from shared.features.bundle import FeatureBundle


@cache
def demo_grammars() -> Grammars:
    """Forms for the tokens of the demo checkpoint."""
    checkpoint = open_checkpoint(str(DEMO_CHECKPOINT))
    tokenizer = (checkpoint.path / "tokenizer.json").read_text(encoding="utf-8")
    return Grammars(tokenizer, vocab_size=960, end_ids=checkpoint.stop_token_ids())


class ScriptedEngine:
    """Yields the tokens of `script` for every request, one at a time while `gate` is open.

    `requests` keeps what was asked and `features` what was loaded for it, `abandoned` counts readers that
    left early, and `error` is raised before the first token.
    """

    context_tokens = 512

    def __init__(self) -> None:
        self.script: tuple[int, ...] = ()
        self.requests: list[GenerationRequest] = []
        self.features: list[tuple[FeatureBundle, ...]] = []
        self.abandoned = 0
        self.error: LenspairError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(
        self, request: GenerationRequest, timings: RequestTimings
    ) -> AsyncGenerator[tuple[TokenOutput, ...], None]:
        self.requests.append(request)
        timings.submitted = timings.first_scheduled = time.monotonic()
        if self.error is not None:
            raise self.error
        is_done = False
        try:
            self.features.append(await request.features.load(0))
            for token_id in self.script[len(request.continuation) :]:
                await self.gate.wait()
                timings.first_token = timings.first_token or time.monotonic()
                request.features.release()
                yield (TokenOutput(token_id, logprob=-0.5, top=(Candidate(token_id, -0.5),)),)
            yield (TokenOutput(None, finish="stop"),)
            is_done = True
        finally:
            request.features.release()
            self.abandoned += not is_done

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 1)

    async def close(self) -> None:
        """Nothing to close."""


class HeldTensors:
    """The FeatureTensors of a request whose tensors are at hand; counts how often they were loaded."""

    def __init__(self, *bundles: FeatureBundle) -> None:
        self.bundles = bundles
        self.loads: list[int] = []

    async def load(self, first: int) -> tuple[FeatureBundle, ...]:
        self.loads.append(first)
        return self.bundles[first:]

    def release(self) -> None:
        """They stay."""
