"""One request between submission and last token: what its reader gets, and what the engine has of it."""

import asyncio
from dataclasses import dataclass, field

from decoder_service.engine.engine import GenerationRequest, RequestTimings, TokenOutput
from shared.features.bundle import FeatureBundle


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tensors of a prompt's features from number `first` on."""

    first: int
    bundles: tuple[FeatureBundle, ...]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with its reader's mailbox. `loaded` are tensors that the runner has yet to take.

    The mailbox holds all tokens that the reader has not taken: at the most its `max_output_tokens`, so a
    reader that stops reading costs no more than one that never got anything.
    """

    request: GenerationRequest
    timings: RequestTimings
    is_open: bool = False
    loaded: Loaded | None = None
    loading: "asyncio.Task[None] | None" = None
    last_token: float | None = None
    _outputs: list[TokenOutput] = field(default_factory=list)
    _error: BaseException | None = None
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, output: TokenOutput) -> None:
        """The reader gets a token."""
        self._outputs.append(output)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """The reader gets what has come so far, and then the error."""
        self._error = error
        self._has_news.set()

    async def take(self) -> tuple[TokenOutput, ...]:
        """All tokens since the last time, one at least. Raises what `fail` was given."""
        await self._has_news.wait()
        if not self._outputs and self._error is not None:
            raise self._error
        if self._error is None:
            self._has_news.clear()
        outputs, self._outputs = tuple(self._outputs), []
        return outputs

    def let_go(self) -> None:
        """Neither the engine nor a fetch needs the request's tensors any more."""
        self.loaded = None
        self.request.features.release()
