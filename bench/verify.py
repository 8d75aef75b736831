"""Compares the running pair with Transformers on the pixels: `make verify CHECKPOINT=dir`.

Float32, greedy, under every condition of verify_conditions.py: prefixes that are reused, answers that are
interrupted, prompts cut anywhere. Token ids must be equal, and the log-probabilities of the 20 best tokens
at the first place nearly so. Where the reference's own two best logits are closer
than float32 arithmetic can tell, a differing token is a tie: it is counted apart and the comparison
resumes from the reference's token. As a control, each DeepStack level is zeroed in the store: then the
comparison must fail.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bench.comparing import Comparison, compare
from bench.decoder_metrics import DecoderMetrics
from bench.deepstack_control import TTL_SECONDS, open_pair_store, zero_each_level
from bench.generated_checkpoint import KINDS, write_generated_checkpoint
from bench.pair_client import PairClient
from bench.reference import Reference
from bench.requests import VerifyRequest, verify_requests
from bench.verify_conditions import Condition, setups
from demo.pair import DEMO_CHECKPOINT, Pair
from demo.ports import free_port

FORCED_TOKENS = 16
EMPTY_SECONDS = 1.0
_ENVIRONMENT = {"LENSPAIR_DTYPE": "float32", "LENSPAIR_STORE_TTL_SECONDS": str(TTL_SECONDS)}


@dataclass(frozen=True, slots=True)
class Verified:
    """All outcomes under one condition.

    Whether it happened at all, and whether nobody was left in the decoder behind it, its metrics say.
    """

    condition: str
    comparisons: tuple[Comparison, ...]
    has_happened: bool
    has_emptied: bool
    reused_tokens: float
    preemptions: float

    @property
    def num_equal(self) -> int:
        return sum(not comparison.problem for comparison in self.comparisons)

    @property
    def has_passed(self) -> bool:
        return self.num_equal == len(self.comparisons) > 0 and self.has_happened and self.has_emptied


@dataclass(frozen=True, slots=True)
class Verification:
    """All conditions on one checkpoint, and how many answers differ after zeroing each level."""

    conditions: tuple[Verified, ...]
    requests: int
    distinct_answers: int
    differing_by_level: tuple[int, ...]
    with_pictures: int

    @property
    def has_passed(self) -> bool:
        return (
            all(condition.has_passed for condition in self.conditions)
            and 2 * self.distinct_answers >= self.requests
            and all(self.differing_by_level)
        )


class Verifier:
    """One checkpoint's requests and true answers, against pairs under all conditions."""

    def __init__(self, checkpoint: Path, requests: Sequence[VerifyRequest]) -> None:
        reference = Reference(checkpoint)
        self._checkpoint = checkpoint
        self._requests = requests
        self._expected = [
            reference.answer(each) for each in tqdm(requests, desc="reference", leave=False, disable=None)
        ]

    async def verify(self) -> Verification:
        """Starts a pair for each setup in turn; on the first one the control is made as well."""
        conditions: list[Verified] = []
        differing: tuple[int, ...] = ()
        pictured = [number for number, each in enumerate(self._requests) if each.media]
        for setup in tqdm(setups(self._checkpoint), desc="setups", leave=False, disable=None):
            port = free_port()
            own = {**setup.environment, "LENSPAIR_METRICS_PORT": str(port)}
            with Pair(self._checkpoint, environment=_ENVIRONMENT, decoder_environment=own) as pair:
                async with PairClient(pair.encoder.address, pair.decoder.address) as client:
                    metrics = DecoderMetrics(port)
                    conditions += [await self._try(each, client, metrics) for each in setup.conditions]
                    if not differing:
                        differing = await self._zero_levels(pair, client, pictured)
        distinct = len({answer.token_ids for answer in self._expected})
        return Verification(tuple(conditions), len(self._requests), distinct, differing, len(pictured))

    async def _try(self, condition: Condition, client: PairClient, metrics: DecoderMetrics) -> Verified:
        before = metrics.read()
        answers = await condition.ask(client, self._requests)
        comparisons = [
            await compare(client, self._requests[number], answer, self._expected[number])
            for number, answer in answers
        ]
        has_emptied = await metrics.is_empty_within(EMPTY_SECONDS)
        after = metrics.read()

        def risen(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        return Verified(
            condition.name,
            tuple(comparisons),
            risen(condition.evidence) > condition.more_than,
            has_emptied,
            risen("lenspair_decoder_reused_tokens_total"),
            risen("lenspair_decoder_preemptions_total"),
        )

    async def _zero_levels(self, pair: Pair, client: PairClient, pictured: list[int]) -> tuple[int, ...]:
        store = open_pair_store(pair.store_url, self._checkpoint)
        try:
            return await zero_each_level(
                client,
                store,
                [self._requests[number] for number in pictured],
                [self._expected[number] for number in pictured],
            )
        finally:
            await store.close()


def _report(name: str, result: Verification) -> None:
    print(name)
    print(f"  {'condition':34} {'equal':>9} {'ties':>5} {'difference':>10} {'reused':>7} {'preempted':>9}")
    for condition in result.conditions:
        total = len(condition.comparisons)
        ties = sum(comparison.ties for comparison in condition.comparisons)
        largest = max((each.largest_difference for each in condition.comparisons), default=0.0)
        equal = f"{condition.num_equal} of {total}"
        print(
            f"  {condition.condition:34} {equal:>9} {ties:5} {largest:10.1e} "
            f"{condition.reused_tokens:7.0f} {condition.preemptions:9.0f}"
        )
        for comparison in condition.comparisons:
            if comparison.problem:
                print(f"    {comparison.name}: {comparison.problem}")
        if not condition.has_happened:
            print("    this condition did not happen: it proves nothing")
        if not condition.has_emptied:
            print("    requests or blocks were left behind in the decoder")
    print(f"  distinct answers: {result.distinct_answers} of {result.requests}")
    for level, differing in enumerate(result.differing_by_level):
        print(f"  DeepStack level {level} zeroed: {differing} of {result.with_pictures} answers fail")
    print(f"{name}: {'verified' if result.has_passed else 'NOT VERIFIED'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="directory to verify")
    parser.add_argument("--generated", action="store_true", help="verify generated checkpoints of each kind")
    parser.add_argument("--requests", type=int, default=42, help="how many requests (default: 42)")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and weights (default: 0)")
    parser.add_argument(
        "--forced-tokens", type=int, default=0, help="forbid the end of an answer before so many tokens"
    )
    arguments = parser.parse_args()
    if arguments.generated:
        return _verify_generated(arguments.requests, arguments.seed)
    requests = verify_requests(arguments.requests, arguments.seed, forced_tokens=arguments.forced_tokens)
    return _verify(str(arguments.checkpoint), arguments.checkpoint, requests)


def _verify(name: str, checkpoint: Path, requests: Sequence[VerifyRequest]) -> int:
    result = asyncio.run(Verifier(checkpoint, requests).verify())
    _report(name, result)
    return 0 if result.has_passed else 1


def _verify_generated(count: int, seed: int) -> int:
    failed = 0
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
            write_generated_checkpoint(Path(folder), kind, seed=seed)
            failed += _verify(kind, Path(folder), verify_requests(count, seed, forced_tokens=FORCED_TOKENS))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
