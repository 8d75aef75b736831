"""A process that is put together as the services are: a server, a background loop, an end.

    python -m tests.rpc.draining_process PORT_FILE MARKER GRACE_SECONDS

`MARKER` is written when a hanging call has cleaned up. A call of `Fail` kills the background loop.
"""

import asyncio
import sys
from pathlib import Path

from shared.rpc.server import RpcServer
from shared.telemetry import set_up_logs
from tests.rpc.servers import settings
from tests.rpc.services import SERVICE, Behaviours, Context

CLEAN_UP_SECONDS = 0.4


class Marking(Behaviours):
    """Leaves a file behind when clean-up is done."""

    def __init__(self, marker: Path) -> None:
        super().__init__(clean_up_seconds=CLEAN_UP_SECONDS, on_call=self._break)
        self.marker = marker
        self.broken = asyncio.Event()

    async def _break(self, _context: Context) -> None:
        self.broken.set()

    async def _hang(self) -> None:
        try:
            await super()._hang()
        finally:
            self.marker.write_text("cleaned up")

    async def run(self) -> None:
        """The background loop."""
        await self.broken.wait()
        raise RuntimeError("the background loop has died")


async def main(port_file: str, marker: str, grace_seconds: str) -> None:
    behaviours = Marking(Path(marker))
    server = RpcServer(
        settings(port_file=Path(port_file), drain_grace_seconds=float(grace_seconds)), [SERVICE]
    )
    server.add(behaviours.register)

    async def work() -> None:
        await server.start()
        await server.set_serving()
        await behaviours.run()

    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work())
        await server.run_until_signal()
        working.cancel()


if __name__ == "__main__":
    set_up_logs("json", "info")
    asyncio.run(main(*sys.argv[1:]))
