"""One question as the decoder service understands it, and the checks of its numbers; knows no model."""

import math
from dataclasses import dataclass, field

from decoder_service.engine.engine import Sampling
from decoder_service.prompt import Turn
from shared.errors import InvalidRequest, InvalidSampling

MAX_TEMPERATURE = 10.0
MAX_TOP_LOGPROBS = 20
MAX_STOP_SEQUENCES = 8
MAX_STOP_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What one request may ask of this server."""

    max_output_tokens: int
    default_output_tokens: int
    max_prompt_characters: int


@dataclass(frozen=True, slots=True)
class Task:
    """One question: turns of text and feature keys, and how the answer is to be generated.

    Fields are those of lenspair.decoder.v1.GenerationTask; `max_output_tokens` None takes the server's
    default.
    """

    turns: tuple[Turn, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_output_tokens: int | None = None
    min_output_tokens: int = 0
    stop_sequences: tuple[str, ...] = ()
    ignore_eos: bool = False
    continuation: tuple[int, ...] = ()

    def output_limit(self, limits: TaskLimits) -> int:
        return limits.default_output_tokens if self.max_output_tokens is None else self.max_output_tokens


def check_task(task: Task, limits: TaskLimits) -> None:
    """Raises InvalidSampling or InvalidRequest for the first field that is out of its range."""
    _check_sampling(task.sampling)
    _check_lengths(task, limits)
    _check_stop_sequences(task.stop_sequences)


def _check_sampling(sampling: Sampling) -> None:
    _check_range("task.sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_range("task.sampling.top_p", sampling.top_p, 0, 1)
    if sampling.top_k < 0:
        raise InvalidSampling("top_k must not be negative", field="task.sampling.top_k")
    if sampling.top_logprobs is not None:
        _check_range("task.top_logprobs", sampling.top_logprobs, 0, MAX_TOP_LOGPROBS)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidSampling(f"{name.rsplit('.', 1)[-1]} must be from {low:g} to {high:g}", field=name)


def _check_lengths(task: Task, limits: TaskLimits) -> None:
    most = task.output_limit(limits)
    if not 1 <= most <= limits.max_output_tokens:
        raise InvalidRequest(
            f"max_output_tokens must be from 1 to {limits.max_output_tokens}", field="task.max_output_tokens"
        )
    if not 0 <= task.min_output_tokens <= most:
        raise InvalidRequest(
            f"min_output_tokens must be from 0 to max_output_tokens ({most})", field="task.min_output_tokens"
        )
    if len(task.continuation) > most:
        raise InvalidRequest(
            f"continuation_token_ids has {len(task.continuation)} tokens, max_output_tokens is {most}",
            field="task.continuation_token_ids",
        )


def _check_stop_sequences(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOP_SEQUENCES:
        raise InvalidRequest(
            f"at most {MAX_STOP_SEQUENCES} stop sequences, got {len(stops)}", field="task.stop_sequences"
        )
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"a stop sequence has 1 to {MAX_STOP_CHARACTERS} characters",
                field=f"task.stop_sequences[{index}]",
            )
