"""What operators see of an answer: its stages, its generation span, its counters; never its text or keys."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from opentelemetry import trace
from prometheus_client import Counter, Histogram

from decoder_service.answer import Ending
from decoder_service.engine.engine import Limits, Prompt
from decoder_service.task import Task

Stage = Literal["look_up", "prompt", "fetch"]

STAGE_SECONDS = Histogram(
    "lenspair_decoder_stage_seconds",
    "Time of one request in one stage before the engine.",
    ["stage"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
PROMPT_TOKENS = Histogram(
    "lenspair_decoder_prompt_tokens",
    "Tokens of one prompt, by kind.",
    ["kind"],
    buckets=[2**exponent for exponent in range(3, 19)],
)
ANSWERS = Counter("lenspair_decoder_answers_total", "Answers by how they ended.", ["finish"])

_tracer = trace.get_tracer("lenspair.decoder")


@contextmanager
def stage(name: Stage) -> Iterator[None]:
    """A span and a time for one stage of a request."""
    started = time.perf_counter()
    with _tracer.start_as_current_span(f"decode.{name}"):
        yield
    STAGE_SECONDS.labels(name).observe(time.perf_counter() - started)


class Generation:
    """The generation span of one answer, in the words of OpenTelemetry's GenAI conventions.

    It is never the current span: an answer is a generator, and lives in its reader's context.
    """

    def __init__(self, model: str, prompt: Prompt, task: Task, limits: Limits) -> None:
        self._span = _tracer.start_span(
            f"chat {model}",
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "lenspair",
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": limits.max_output_tokens,
                "gen_ai.request.temperature": task.sampling.temperature,
                "gen_ai.request.top_p": task.sampling.top_p,
                "gen_ai.request.choice.count": task.sample_count,
                "lenspair.prompt.visual_tokens": prompt.visual_tokens,
            },
        )
        PROMPT_TOKENS.labels("text").observe(len(prompt.token_ids) - prompt.visual_tokens)
        PROMPT_TOKENS.labels("visual").observe(prompt.visual_tokens)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Ends the span with the block, as an error when the answer was not finished."""
        try:
            yield
        except BaseException as error:
            is_abandoned = isinstance(error, GeneratorExit | asyncio.CancelledError)
            self._span.set_attribute("error.type", "abandoned" if is_abandoned else type(error).__name__)
            self._span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            self._span.end()

    def finish(self, ending: Ending) -> None:
        """Books how the answer went."""
        for sample in ending.samples:
            ANSWERS.labels(sample.finish).inc()
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": ending.input_tokens,
                "gen_ai.usage.output_tokens": ending.output_tokens,
                "gen_ai.response.finish_reasons": [sample.finish for sample in ending.samples],
                "lenspair.prompt.reused_tokens": ending.reused_tokens,
                "lenspair.queue.seconds": ending.queue_time,
                "lenspair.time_to_first_token.seconds": ending.time_to_first_token,
            }
        )
