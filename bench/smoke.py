"""How much encoder and decoder slow each other on one machine, with the default settings: `make bench-smoke`.

Blocks alternate: one long answer decodes alone, then while new pictures are encoded without a pause; and
pictures are encoded alone in the pauses between. Medians over all blocks are compared.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tqdm import tqdm

from bench.generated_checkpoint import write_generated_checkpoint
from bench.pair_client import PairClient
from bench.requests import picture
from demo.pair import Pair

MOST_SLOWDOWN = 2.0
RESULTS = Path(__file__).parent / "results" / "smoke.json"


class Smoke:
    """The measurements of one pair."""

    def __init__(self, client: PairClient, tokens: int) -> None:
        self._client = client
        self._tokens = tokens
        self._rng = random.Random(time.time_ns())
        self.encode_seconds: dict[str, list[float]] = {"alone": [], "together": []}
        self.step_seconds: dict[str, list[float]] = {"alone": [], "together": []}

    async def block(self) -> None:
        """One round: decode alone, encode alone, both together."""
        await self._decode("alone")
        for _ in range(4):
            await self._encode("alone")
        async with self._encoding():
            await self._decode("together")

    async def _decode(self, company: str) -> None:
        intervals = await self._client.step_intervals("Tell me something long.", self._tokens)
        self.step_seconds[company] += intervals

    async def _encode(self, company: str) -> None:
        data = picture(self._rng)  # drawn at random: always a miss
        started = time.perf_counter()
        await self._client.encode(data)
        self.encode_seconds[company].append(time.perf_counter() - started)

    @asynccontextmanager
    async def _encoding(self) -> AsyncIterator[None]:
        async def forever() -> None:
            while True:
                await self._encode("together")

        encoding = asyncio.create_task(forever())
        try:
            yield
        finally:
            encoding.cancel()
            await asyncio.wait({encoding})


async def _measure(pair: Pair, rounds: int, tokens: int) -> Smoke:
    async with PairClient(pair.encoder.address, pair.decoder.address) as client:
        smoke = Smoke(client, tokens)
        for _ in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
            await smoke.block()
    return smoke


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: 5)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
        write_generated_checkpoint(Path(folder), "dense", size="medium")
        # Each service takes all cores, as it does by default; `make up` would divide them.
        with Pair(folder, environment={"LENSPAIR_TORCH_THREADS": "0"}) as pair:
            smoke = asyncio.run(_measure(pair, arguments.rounds, arguments.tokens))
    return _report(smoke)


def _report(smoke: Smoke) -> int:
    rows = {"decode step": smoke.step_seconds, "encode": smoke.encode_seconds}
    medians = {
        name: {company: statistics.median(values) for company, values in by_company.items()}
        for name, by_company in rows.items()
    }
    print(f"{'':12} {'alone':>10} {'together':>10} {'slowdown':>9}")
    for name, median in medians.items():
        ratio = median["together"] / median["alone"]
        print(f"{name:12} {median['alone'] * 1e3:7.1f} ms {median['together'] * 1e3:7.1f} ms {ratio:8.2f}x")
    slowdown = medians["decode step"]["together"] / medians["decode step"]["alone"]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"decode_slowdown": round(slowdown, 3)}, indent=2) + "\n")
    print(f"decode steps beside a busy encoder: {slowdown:.2f}x, at most {MOST_SLOWDOWN:.0f}x is allowed")
    return 0 if slowdown <= MOST_SLOWDOWN else 1


if __name__ == "__main__":
    sys.exit(main())
