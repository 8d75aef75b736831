"""A service as a process that ends by itself.

    python -m tests.rpc.ending_process (load | loop) METRICS_PORT

`load` can't load its model; `loop` loads and serves, and then its background loop dies.
"""

import asyncio
import sys

from shared.features.codec import FeatureCodec
from shared.rpc.process import run_process
from shared.store.memory import MemoryFeatureStore
from tests.rpc.servers import settings
from tests.rpc.services import SERVICE, Behaviours


class Dying:
    """A service whose background loop dies of what an operating system may raise."""

    def __init__(self) -> None:
        self.store = MemoryFeatureStore(FeatureCodec(fingerprint="0" * 64, chunk_bytes=4096), ttl_seconds=60)

    async def run(self) -> None:
        await asyncio.sleep(0.05)
        raise OSError("the loop has died")

    async def close(self) -> None:
        await self.store.close()


def unloadable() -> Dying:
    raise FileNotFoundError("there is no such checkpoint")


def main(kind: str, metrics_port: str) -> int:
    build = {"load": unloadable, "loop": Dying}[kind]
    return run_process(settings(metrics_port=int(metrics_port)), SERVICE, Behaviours().register, build)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
