"""A network between a client and a server that takes its time, for tests of cancellation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


@asynccontextmanager
async def slow_network(server: Path, listen: Path, *, delay_seconds: float) -> AsyncIterator[str]:
    """Forwards a unix socket to another one; what comes back is held up. Yields the URL to connect to."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(server)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, upstream_writer, 0))
                group.create_task(_forward(upstream_reader, writer, delay_seconds))
        finally:
            upstream_writer.close()
            writer.close()
            tasks.discard(task)

    proxy = await asyncio.start_unix_server(serve, listen)
    try:
        yield f"unix://{listen}"
    finally:
        proxy.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_seconds: float) -> None:
    with suppress(OSError):
        while data := await reader.read(64 * 1024):
            await asyncio.sleep(delay_seconds)
            writer.write(data)
            await writer.drain()
        writer.write_eof()
