"""A StepRunner without a model, steered through its attributes."""

import threading
from collections.abc import Callable, Sequence

from decoder_service.engine.engine import (
    GenerationRequest,
    Limits,
    Prompt,
    RequestTimings,
    Sampling,
    TokenOutput,
)
from decoder_service.engine.kv_cache import BlockManager
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.sampling import Choice
from decoder_service.engine.scheduler import BatchLimits, Scheduler, Step
from shared.errors import InvalidRequest
from shared.features.bundle import FeatureBundle
from tests.decoder_fakes import HeldTensors

STOP = 9


class FakeRunner:
    """Token number n of every answer is 100 + n, unless `script` (request id -> tokens) says otherwise.

    `steps` lists the request ids of each step; while `gate` is closed, steps wait. `before_step` may raise.
    """

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.opened: set[str] = set()
        self.script: dict[str, list[int]] = {}
        self.refused: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.before_step: Callable[[Step], None] = lambda _: None

    def check(self, request: GenerationRequest) -> None:
        if request.request_id in self.refused:
            raise InvalidRequest("a corrupt tensor", field="task.turns")

    def open(self, request: GenerationRequest) -> None:
        self.opened.add(request.request_id)

    def check_features(self, prompt: Prompt, first: int, bundles: Sequence[FeatureBundle]) -> None:
        """All are fine."""

    def provide(self, request_id: str, first: int, bundles: Sequence[FeatureBundle]) -> None:
        assert request_id in self.opened

    def close(self, request_id: str) -> None:
        self.opened.discard(request_id)

    def run(self, step: Step) -> dict[str, Choice]:
        self.entered.set()
        assert self.gate.wait(timeout=30), "the test forgot to open the gate"
        self.before_step(step)
        names = [chunk.request_id for chunk in step.chunks]
        assert set(names) <= self.opened
        self.steps.append(names)
        return {
            chunk.request_id: Choice(self._token(chunk.request_id, chunk.output_index))
            for chunk in step.chunks
            if chunk.samples
        }

    def _token(self, request_id: str, index: int) -> int:
        script = self.script.get(request_id, [])
        return script[index] if index < len(script) else 100 + index


def engine_of(
    runner: FakeRunner,
    *,
    size: int = 4,
    tokens: int = 64,
    waiting: int = 8,
    blocks: int = 100,
    context: int = 1000,
) -> EngineLoop:
    scheduler = Scheduler(BlockManager(blocks), BatchLimits(size, tokens, waiting))
    return EngineLoop(runner, scheduler, context_tokens=context)


def request(
    request_id: str,
    *,
    prompt: int = 5,
    output: int = 4,
    continuation: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt=Prompt(tuple(range(prompt)), tuple((n, n, n) for n in range(prompt)), prompt),
        features=HeldTensors(),
        sampling=Sampling(),
        limits=Limits(output, stop_token_ids=frozenset() if ignore_eos else frozenset({STOP})),
        continuation=continuation,
    )


async def collect(engine: EngineLoop, asked: GenerationRequest) -> list[TokenOutput]:
    return [output async for outputs in engine.generate(asked, RequestTimings()) for output in outputs]


def token_ids(outputs: list[TokenOutput]) -> list[int | None]:
    return [output.token_id for output in outputs]
