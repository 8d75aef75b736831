"""Servers that break the rules, and networks that break: what stands between a store and a real server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

# The bytes that answer what was received at once; None closes the connection.
Answer = Callable[[bytes], bytes | None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def fake_server(listen: Path, answer: Answer) -> AsyncIterator[str]:
    """A server of any manners. Yields the URL to connect to."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(1 << 20):
            reply = answer(received)
            if reply is None:
                break
            writer.write(reply)
            await writer.drain()

    async with _listening(listen, serve) as url:
        yield url


async def _nothing() -> None:
    """What happens when a connection breaks, by default."""


class BreakingNetwork:
    """Forwards a unix socket to another one, and breaks a connection after `breaks_after` answered bytes.

    It breaks one only, once `on_break` has returned; set `breaks_after` again for the next one.
    """

    def __init__(self, server: Path) -> None:
        self._server = server
        self.breaks_after: int | None = None
        self.on_break: Callable[[], Awaitable[None]] = _nothing
        self.num_broken = 0

    @asynccontextmanager
    async def open(self, listen: Path) -> AsyncIterator[str]:
        """Yields the URL to connect to."""
        async with _listening(listen, self._serve) as url:
            yield url

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._server)
        there = asyncio.create_task(_forward(reader, upstream_writer))
        try:
            while data := await upstream_reader.read(64 * 1024):
                if self.breaks_after is not None and len(data) >= self.breaks_after:
                    writer.write(data[: self.breaks_after])
                    self.breaks_after = None
                    await self.on_break()
                    self.num_broken += 1
                    return
                if self.breaks_after is not None:
                    self.breaks_after -= len(data)
                writer.write(data)
                await writer.drain()
        finally:
            there.cancel()
            upstream_writer.close()


@asynccontextmanager
async def _listening(listen: Path, serve: Serve) -> AsyncIterator[str]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(OSError):
                await serve(reader, writer)
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_unix_server(serve_one, listen)
    try:
        yield f"unix://{listen}"
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.CancelledError):
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
