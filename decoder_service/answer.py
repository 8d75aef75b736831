"""An answer as it grows, sample by sample: from tokens to pieces of text and a closing account."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decoder_service.detokenize import Detokenizer
from decoder_service.engine.engine import Prompt, RequestTimings, TokenOutput


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a sample: new characters (maybe none yet), and the tokens behind them."""

    text: str
    tokens: tuple[TokenOutput, ...]
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class SampleEnding:
    """How one sample went; `finish` is "stop" or "length"."""

    sample_index: int
    finish: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer went; always the last value. Times are seconds.

    `output_tokens` are those of all samples, `time_to_first_token` that of the first token of any,
    `reused_tokens` and `queue_time` those of the first sample.
    """

    samples: tuple[SampleEnding, ...]
    input_tokens: int
    visual_tokens: int
    reused_tokens: int
    time_to_first_token: float
    queue_time: float

    @property
    def finish(self) -> str:
        """Why the first sample ended."""
        return self.samples[0].finish

    @property
    def output_tokens(self) -> int:
        return sum(sample.output_tokens for sample in self.samples)


class Answer:
    """Turns the tokens of one sample into pieces.

    Tokens of a continuation count, but neither they nor their text are sent.
    """

    def __init__(
        self, detokenizer: Detokenizer, continuation: tuple[int, ...], sample_index: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._sample_index = sample_index
        self._output_tokens = 0
        self.timings = RequestTimings()
        self.finish = ""
        for token_id in continuation:
            self._add_token(token_id)

    def add(self, outputs: Iterable[TokenOutput]) -> Piece:
        """The piece that tokens make; sets `finish` when the last one is among them. None follows it."""
        texts, tokens = [], []
        for output in outputs:
            if self.finish:
                break
            if output.token_id is not None:
                texts.append(self._add_token(output.token_id))
                tokens.append(output)
            if output.finish and not self.finish:
                self.finish = output.finish
                texts.append(self._detokenizer.finish())
        return Piece("".join(texts), tuple(tokens), self._sample_index)

    def ending(self) -> SampleEnding:
        """The account of a finished sample."""
        return SampleEnding(self._sample_index, self.finish, self._output_tokens)

    def _add_token(self, token_id: int) -> str:
        self._output_tokens += 1
        text = self._detokenizer.add(token_id)
        if self._detokenizer.is_stopped:
            self.finish = "stop"
        return text


def ending_of(answers: Sequence[Answer], prompt: Prompt, arrived: float) -> Ending:
    """The account of finished samples; `arrived` is the monotonic time of their question's arrival."""
    timings = answers[0].timings
    first_tokens = [each.timings.first_token for each in answers if each.timings.first_token is not None]
    scheduled = timings.submitted if timings.first_scheduled is None else timings.first_scheduled
    return Ending(
        samples=tuple(answer.ending() for answer in answers),
        input_tokens=len(prompt.token_ids),
        visual_tokens=prompt.visual_tokens,
        reused_tokens=timings.reused_tokens,
        time_to_first_token=min(first_tokens, default=arrived) - arrived,
        queue_time=scheduled - timings.submitted,
    )
