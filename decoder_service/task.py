"""One question as the decoder service understands it, and the checks of its numbers; knows no model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from decoder_service.engine.engine import Sampling
from decoder_service.engine.sequence import Priority
from decoder_service.output_format import OutputFormat
from decoder_service.prompt import Turn
from shared.errors import InvalidRequest, InvalidSampling

MAX_TEMPERATURE = 10.0
MAX_TOP_LOGPROBS = 20
MAX_STOP_SEQUENCES = 8
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 10.0
MAX_SAMPLES = 16
MAX_FIRST_SAMPLE = 1023


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What one request may ask of this server."""

    max_output_tokens: int
    default_output_tokens: int
    max_prompt_characters: int
    vocab_size: int


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
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    continuation: tuple[int, ...] = ()
    priority: Priority = Priority.NORMAL
    sample_count: int = 1
    first_sample: int = 0
    output_format: OutputFormat | None = None

    @property
    def sample_indices(self) -> range:
        return range(self.first_sample, self.first_sample + self.sample_count)

    def output_limit(self, limits: TaskLimits) -> int:
        return limits.default_output_tokens if self.max_output_tokens is None else self.max_output_tokens


def check_task(task: Task, limits: TaskLimits) -> None:
    """Raises InvalidSampling or InvalidRequest for the first field that is out of its range."""
    _check_sampling(task.sampling)
    _check_lengths(task, limits)
    _check_stop_sequences(task.stop_sequences)
    if len(task.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"at most {MAX_STOP_TOKENS} stop token ids, got {len(task.stop_token_ids)}",
            field="task.stop_token_ids",
        )
    _check_samples(task)
    if task.output_format is not None and task.ignore_eos:
        raise InvalidRequest("ignore_eos must not be set beside output_format", field="task.ignore_eos")
    _check_vocabulary("task.stop_token_ids", task.stop_token_ids, limits)
    _check_vocabulary("task.continuation_token_ids", task.continuation, limits)
    _check_vocabulary("task.sampling.logit_bias", [each for each, _ in task.sampling.logit_bias], limits)


def _check_sampling(sampling: Sampling) -> None:
    _check_range("task.sampling.temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_range("task.sampling.top_p", sampling.top_p, 0, 1)
    _check_range("task.sampling.min_p", sampling.min_p, 0, 1)
    if sampling.top_k < 0:
        raise InvalidSampling("top_k must not be negative", field="task.sampling.top_k")
    _check_range(
        "task.sampling.repetition_penalty",
        sampling.repetition_penalty,
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    )
    _check_range("task.sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("task.sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_biases(sampling.logit_bias)
    if sampling.top_logprobs is not None:
        _check_range("task.top_logprobs", sampling.top_logprobs, 0, MAX_TOP_LOGPROBS)


def _check_biases(logit_bias: tuple[tuple[int, float], ...]) -> None:
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidSampling(
            f"logit_bias has at most {MAX_LOGIT_BIASES} tokens, got {len(logit_bias)}",
            field="task.sampling.logit_bias",
        )
    for token_id, bias in logit_bias:
        _check_range(f"task.sampling.logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)


def _check_vocabulary(name: str, token_ids: Sequence[int], limits: TaskLimits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"token ids are from 0 to {limits.vocab_size - 1}, got {token_id}", field=name
            )


def _check_samples(task: Task) -> None:
    if not 1 <= task.sample_count <= MAX_SAMPLES:
        raise InvalidRequest(f"sample_count must be from 1 to {MAX_SAMPLES}", field="task.sample_count")
    if not 0 <= task.first_sample <= MAX_FIRST_SAMPLE:
        raise InvalidRequest(f"first_sample must be from 0 to {MAX_FIRST_SAMPLE}", field="task.first_sample")
    if task.continuation and task.sample_count > 1:
        raise InvalidRequest(
            "continuation_token_ids goes with a sample_count of 1 only", field="task.continuation_token_ids"
        )


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
