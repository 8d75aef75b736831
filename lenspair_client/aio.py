"""The asyncio client; the same methods as the blocking one."""

# ruff: noqa: ASYNC109  a timeout here is the deadline that travels to the servers

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Self

from lenspair_client.async_calls import AsyncCalls, Returned
from lenspair_client.effects import Flow
from lenspair_client.options import ClientOptions
from lenspair_client.requests import Requests
from lenspair_client.values import (
    Answer,
    Feature,
    FeatureDescription,
    Generation,
    Image,
    MediaSettings,
    StoreStats,
    TokenCount,
    Turn,
)


class AsyncLenspairClient:
    """Asks a Lenspair pair, on the event loop that runs when it is made.

    Close it, or use it as an async context manager.

    Addresses are `host:port`; `dns:///host:port` spreads calls over all addresses of a name, and
    `ipv4:10.0.0.1:50051,10.0.0.2:50051` over those listed: where one server goes away, the other serves. An
    image is the bytes of a file or its path. `timeout` is in seconds and holds for the whole method, all
    calls that it makes together; without one the options' holds.

    What fails because a server or the store is gone or full is tried again while there is time; see
    ClientOptions. Every method raises LenspairRpcError when a call fails for good, and UnreadableImage
    when a file can't be read.
    """

    def __init__(self, encoder: str, decoder: str, options: ClientOptions | None = None) -> None:
        options = options or ClientOptions()
        self._requests = Requests(options)
        self._calls = AsyncCalls(encoder, decoder, options)

    async def encode(
        self, image: Image, *, settings: MediaSettings | None = None, timeout: float | None = None
    ) -> Feature:
        """Makes sure that a picture's features are in the store.

        Pictures that exceed a message go in chunks.
        """
        return await self._calls.run(self._requests.encode(image, settings, timeout))

    async def lookup(
        self, image: Image, *, settings: MediaSettings | None = None, timeout: float | None = None
    ) -> Feature | None:
        """A picture's features, if the store has them; the picture itself is not sent."""
        return await self._calls.run(self._requests.look_up(image, settings, timeout))

    async def ensure(
        self,
        images: Sequence[Image],
        *,
        settings: MediaSettings | None = None,
        timeout: float | None = None,
    ) -> tuple[Feature, ...]:
        """The features of pictures, in their order: looked up together, then encoded where missing."""
        return await self._calls.run(self._requests.ensure(images, settings, timeout))

    async def generate(
        self, turns: Sequence[Turn], generation: Generation | None = None, *, timeout: float | None = None
    ) -> Answer:
        """Answers a conversation; asked for again when a decoder goes away or is busy."""
        return await self._calls.run(self._requests.generate(turns, generation, timeout))

    def stream(
        self, turns: Sequence[Turn], generation: Generation | None = None, *, timeout: float | None = None
    ) -> AsyncGenerator[str | Answer, None]:
        """Yields an answer's text as it comes, and last the Answer.

        When a decoder goes away, the answer goes on at another one: no text is lost or repeated. Closing
        the generator ends the call.
        """
        return self._stream(self._requests.stream(turns, generation, timeout))

    async def ask(
        self,
        question: str,
        images: Sequence[Image] = (),
        *,
        system: str = "",
        generation: Generation | None = None,
        settings: MediaSettings | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Answers a question about pictures: looks them up, encodes what is missing, generates.

        What the decoder can't get from the store is encoded again.
        """
        flow = self._requests.ask(
            question,
            images,
            system=system,
            generation=generation,
            settings=settings,
            timeout=timeout,
            is_stream=False,
        )
        return await self._calls.run(flow)

    def ask_stream(
        self,
        question: str,
        images: Sequence[Image] = (),
        *,
        system: str = "",
        generation: Generation | None = None,
        settings: MediaSettings | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[str | Answer, None]:
        """`ask`, with the text as it comes, and last the Answer; see `stream`."""
        flow = self._requests.ask(
            question,
            images,
            system=system,
            generation=generation,
            settings=settings,
            timeout=timeout,
            is_stream=True,
        )
        return self._stream(flow)

    async def count_tokens(self, turns: Sequence[Turn], *, timeout: float | None = None) -> TokenCount:
        """How long a prompt is; the model does not run."""
        return await self._calls.run(self._requests.count_tokens(turns, timeout))

    async def keep_alive(
        self, features: Sequence[Feature | str], time_to_live: float, *, timeout: float | None = None
    ) -> tuple[datetime | None, ...]:
        """Lets stored features, or those of keys, live at least so many seconds from now.

        Returns when the store forgets each; None for those that it does not have.
        """
        return await self._calls.run(self._requests.keep_alive(features, time_to_live, timeout))

    async def evict(
        self, features: Sequence[Feature | str], *, timeout: float | None = None
    ) -> tuple[bool, ...]:
        """Deletes stored features, or those of keys; tells of each whether it was there."""
        return await self._calls.run(self._requests.evict(features, timeout))

    async def describe(
        self, features: Sequence[Feature | str], *, timeout: float | None = None
    ) -> tuple[FeatureDescription | None, ...]:
        """What is known of stored features, or of keys; None for what is not there. Refreshes nothing."""
        return await self._calls.run(self._requests.describe(features, timeout))

    async def store_stats(self, *, timeout: float | None = None) -> StoreStats:
        """Counts the caller's stored features, which may take a while in a large store."""
        return await self._calls.run(self._requests.store_stats(timeout))

    async def close(self) -> None:
        """Ends open calls and connections."""
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream(self, flow: Flow[Answer]) -> AsyncGenerator[str | Answer, None]:
        async with aclosing(self._calls.steps(flow)) as steps:
            async for step in steps:
                yield step.value if isinstance(step, Returned) else step
