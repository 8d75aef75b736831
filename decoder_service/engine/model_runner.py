"""Runs one step on the model: packs rows, places features, samples; decides nothing about who runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from decoder_service.engine.attention import PackedPlan, PackedSequence, plan_step
from decoder_service.engine.checks import check_features, check_request
from decoder_service.engine.engine import GenerationRequest, Prompt
from decoder_service.engine.kv_pool import BlockNumbers, KVPool
from decoder_service.engine.language_model import LanguageModel
from decoder_service.engine.sampling import Choice, Outcome, SamplingRow, choose
from decoder_service.engine.scheduler import Chunk, Step
from decoder_service.engine.token_rules import TokenRules
from shared.errors import LenspairError, OutOfMemory
from shared.features.bundle import FeatureBundle


@dataclass(frozen=True, slots=True)
class _VisualSpan:
    """Tokens `[start, end)` of a prompt are rows of `features`, from `first_row` on."""

    start: int
    end: int
    features: torch.Tensor
    first_row: int


@dataclass(slots=True)
class _Inputs:
    """What the model needs of one open request.

    `positions` `[3, prompt tokens]` are temporal, height and width. `spans` are those
    whose features are at hand: from the first one that has to be computed on, until the prompt is.
    """

    prompt: Prompt
    rules: TokenRules
    positions: torch.Tensor
    next_position: int
    blocks: BlockNumbers
    spans: tuple[_VisualSpan, ...] = ()

    @classmethod
    def of(cls, request: GenerationRequest, model: LanguageModel) -> Self:
        prompt = request.prompt
        axes = torch.tensor(prompt.positions, dtype=torch.long).reshape(-1, 3).T
        return cls(
            prompt=prompt,
            rules=TokenRules(request, model.vocab_size, model.visual_token_ids),
            positions=axes.contiguous(),
            next_position=prompt.next_position,
            blocks=BlockNumbers(model.device),
        )

    def positions_of(self, chunk: Chunk) -> torch.Tensor:
        """`[3, chunk tokens]`; generated tokens stand at one place on all three axes."""
        length = self.positions.shape[1]
        if chunk.end <= length:
            return self.positions[:, chunk.start : chunk.end]
        first = self.next_position - length + max(chunk.start, length)
        generated = torch.arange(first, self.next_position - length + chunk.end).expand(3, -1)
        return torch.cat([self.positions[:, chunk.start :], generated], dim=1)

    def visual_rows(self, chunk: Chunk) -> Iterator[tuple[int, torch.Tensor]]:
        """(row, features from there on) for each stretch of visual tokens in a chunk."""
        for span in self.spans:
            start, end = max(span.start, chunk.start), min(span.end, chunk.end)
            if start < end:
                first = span.first_row + start - span.start
                yield chunk.row + start - chunk.start, span.features[first : first + end - start]


class ModelRunner:
    """Keeps the inputs of open requests and runs steps over them; used from one thread at a time."""

    def __init__(self, model: LanguageModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool
        self._inputs: dict[str, _Inputs] = {}

    def check(self, request: GenerationRequest) -> None:
        """Raises a LenspairError for a request that the model can't compute; may run on any thread."""
        check_request(request, self._model.shape)

    def check_features(self, prompt: Prompt, first: int, bundles: Sequence[FeatureBundle]) -> None:
        """Raises a LenspairError for features that the model can't compute with; on any thread."""
        check_features(prompt, first, bundles, self._model.shape)

    def open(self, request: GenerationRequest) -> None:
        """Takes a request's inputs; steps may name it until it is closed."""
        self._inputs[request.request_id] = _Inputs.of(request, self._model)

    def provide(self, request_id: str, first: int, bundles: Sequence[FeatureBundle]) -> None:
        """Takes the features of an open request from number `first` of its prompt on."""
        inputs = self._inputs[request_id]
        inputs.spans = tuple(_visual_spans(inputs.prompt.visual_spans[first:], bundles))

    def close(self, request_id: str) -> None:
        """Forgets a request's inputs; unknown ids are fine."""
        self._inputs.pop(request_id, None)

    @torch.inference_mode()
    def run(self, step: Step) -> dict[str, Outcome]:
        """See StepRunner: computes a step's tokens, and chooses the next one of each chunk that samples."""
        with memory_errors():
            return self._run(step)

    def _run(self, step: Step) -> dict[str, Outcome]:
        hidden = self._forward(step)
        rows, failures = self._sampling_rows(step)
        if not rows:
            return failures
        chunks = list(rows)
        logits = self._model.logits(hidden[[chunk.row_end - 1 for chunk in chunks]])
        outcomes = choose(logits, list(rows.values()))
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            inputs = self._of(chunk)
            inputs.spans = ()  # the prompt is in the cache: let go of its features
            if isinstance(outcome, Choice):
                inputs.rules.accept(outcome.token_id)
        return failures | {chunk.request_id: each for chunk, each in zip(chunks, outcomes, strict=True)}

    def _sampling_rows(self, step: Step) -> tuple[dict[Chunk, SamplingRow], dict[str, Outcome]]:
        """How the token of each chunk that samples is chosen, and whose rules fail."""
        rows: dict[Chunk, SamplingRow] = {}
        failures: dict[str, Outcome] = {}
        for chunk in step.chunks:
            if chunk.samples:
                try:
                    rows[chunk] = self._of(chunk).rules.row(chunk.output_index)
                except LenspairError as error:
                    failures[chunk.request_id] = error
        return rows, failures

    def _forward(self, step: Step) -> torch.Tensor:
        device = self._model.device
        token_ids = [token_id for chunk in step.chunks for token_id in chunk.token_ids]
        embeds = self._model.embed(torch.tensor(token_ids, device=device))
        positions = torch.cat([self._of(chunk).positions_of(chunk) for chunk in step.chunks], dim=1)
        visual_rows, deepstack = self._place_features(step, embeds)
        return self._model.forward(embeds, positions.to(device), visual_rows, deepstack, self._plan(step))

    def _place_features(self, step: Step, embeds: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Writes the main features over their rows of `embeds`; gives these rows and the other levels."""
        rows, stretches = [torch.empty(0, dtype=torch.long)], []
        for chunk in step.chunks:
            for row, features in self._of(chunk).visual_rows(chunk):
                rows.append(torch.arange(row, row + len(features)))
                stretches.append(features)
        visual_rows = torch.cat(rows).to(embeds.device)
        if not stretches:
            return visual_rows, []
        features = torch.cat(stretches).to(embeds.device, embeds.dtype)
        main, *deepstack = torch.split(features, self._model.hidden_size, dim=1)
        embeds[visual_rows] = main
        return visual_rows, deepstack

    def _plan(self, step: Step) -> PackedPlan:
        sequences = [
            PackedSequence(chunk.row, chunk.row_end, chunk.end, self._of(chunk).blocks.of(chunk.block_table))
            for chunk in step.chunks
        ]
        return plan_step(self._pool, sequences)

    def _of(self, chunk: Chunk) -> _Inputs:
        return self._inputs[chunk.request_id]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises OutOfMemory for what torch says when memory is short, on a device or on the CPU."""
    try:
        yield
    except RuntimeError as error:
        is_short = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if not is_short:
            raise
        raise OutOfMemory("the device has too little memory for a step") from error


def _visual_spans(
    visual_spans: Sequence[tuple[tuple[int, int], ...]], bundles: Sequence[FeatureBundle]
) -> Iterator[_VisualSpan]:
    for bundle, spans in zip(bundles, visual_spans, strict=True):
        row = 0
        for start, count in spans:
            yield _VisualSpan(start, start + count, bundle.tensor, row)
            row += count
