"""One answer as it grows: from the engine's tokens to pieces of text and a closing account."""

from collections.abc import Iterable
from dataclasses import dataclass

from decoder_service.detokenize import Detokenizer
from decoder_service.engine.engine import Prompt, RequestTimings, TokenOutput


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer: new characters (maybe none yet), and the tokens behind them."""

    text: str
    tokens: tuple[TokenOutput, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer went; always the last value. `finish` is "stop" or "length", times are seconds."""

    finish: str
    input_tokens: int
    visual_tokens: int
    output_tokens: int
    reused_tokens: int
    time_to_first_token: float
    queue_time: float


class Answer:
    """Turns tokens into pieces. Tokens of a continuation count, but neither they nor their text are sent."""

    def __init__(self, detokenizer: Detokenizer, continuation: tuple[int, ...]) -> None:
        self._detokenizer = detokenizer
        self._output_tokens = 0
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
        return Piece("".join(texts), tuple(tokens))

    def ending(self, prompt: Prompt, timings: RequestTimings, arrived: float) -> Ending:
        """The account of a finished answer; `arrived` is the monotonic time of the request's arrival."""
        first_token = arrived if timings.first_token is None else timings.first_token
        scheduled = timings.submitted if timings.first_scheduled is None else timings.first_scheduled
        return Ending(
            finish=self.finish,
            input_tokens=len(prompt.token_ids),
            visual_tokens=prompt.visual_tokens,
            output_tokens=self._output_tokens,
            reused_tokens=timings.reused_tokens,
            time_to_first_token=first_token - arrived,
            queue_time=scheduled - timings.submitted,
        )

    def _add_token(self, token_id: int) -> str:
        self._output_tokens += 1
        text = self._detokenizer.add(token_id)
        if self._detokenizer.is_stopped:
            self.finish = "stop"
        return text
