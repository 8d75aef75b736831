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

from bench.decoder_metrics import DecoderMetrics
from bench.generated_checkpoint import KINDS, write_generated_checkpoint
from bench.pair_client import PairAnswer, PairClient
from bench.reference import Reference, ReferenceAnswer
from bench.requests import VerifyRequest, verify_requests
from bench.stored_levels import StoredLevels
from bench.verify_conditions import Condition, setups
from demo.pair import DEMO_CHECKPOINT, Pair
from demo.ports import free_port
from shared.checkpoint import open_checkpoint
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore

TIE_GAP = 1e-5
LOGPROB_TOLERANCE = 1e-3
FORCED_TOKENS = 16
# No feature may expire during a comparison.
TTL_SECONDS = 3600
_ENVIRONMENT = {"LENSPAIR_DTYPE": "float32", "LENSPAIR_STORE_TTL_SECONDS": str(TTL_SECONDS)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request's outcome: `problem` is empty when the pair equals the reference, ties aside."""

    name: str
    problem: str
    ties: int
    largest_difference: float


@dataclass(frozen=True, slots=True)
class Verified:
    """All outcomes under one condition; `evidence` is how much of it happened, by the decoder's metrics."""

    condition: str
    comparisons: tuple[Comparison, ...]
    evidence: float
    reused_tokens: float
    preemptions: float

    @property
    def num_equal(self) -> int:
        return sum(not comparison.problem for comparison in self.comparisons)

    @property
    def has_passed(self) -> bool:
        return self.num_equal == len(self.comparisons) > 0 and self.evidence > 0


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


async def compare(
    client: PairClient, request: VerifyRequest, ours: PairAnswer, reference: ReferenceAnswer
) -> Comparison:
    """Compares one answer; asks the pair again from the reference's token after each tie."""
    difference = _largest_difference(ours.first_logprobs, reference.first_logprobs)
    if difference > LOGPROB_TOLERANCE:
        problem = f"log-probabilities of the first token differ by {difference:.2e}"
        return Comparison(request.name, problem, 0, difference)
    ties = 0
    tokens = ours.token_ids
    while (place := _first_difference(tokens, reference.token_ids)) is not None:
        if place >= len(reference.token_ids) or reference.relative_gaps[place] >= TIE_GAP:
            problem = f"token {place}: {tokens[place : place + 4]} is not {reference.token_ids[place:][:4]}"
            return Comparison(request.name, problem, ties, difference)
        ties += 1
        kept = reference.token_ids[: place + 1]
        tokens = kept if kept[-1] < 0 else (await client.answer(request, kept)).token_ids
    return Comparison(request.name, "", ties, difference)


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
        pictured = [number for number, each in enumerate(self._requests) if each.images]
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
        after = metrics.read()

        def risen(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        return Verified(
            condition.name,
            tuple(comparisons),
            risen(condition.evidence),
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


async def _compare_all(
    client: PairClient,
    requests: Sequence[VerifyRequest],
    answers: Sequence[PairAnswer],
    expected: Sequence[ReferenceAnswer],
) -> tuple[Comparison, ...]:
    return tuple([await compare(client, *each) for each in zip(requests, answers, expected, strict=True)])


async def zero_each_level(
    client: PairClient,
    store: FeatureStore,
    requests: Sequence[VerifyRequest],
    expected: Sequence[ReferenceAnswer],
) -> tuple[int, ...]:
    """For each DeepStack level: how many of the requests fail while the store holds zeros in it."""
    keys = {await client.encode(image) for request in requests for image in request.images}
    differing: list[int] = []
    stored = await StoredLevels.read(store, keys)
    for level in range(stored.count):
        async with stored.zeroed(level):
            answers = await client.answer_all(requests)
            comparisons = await _compare_all(client, requests, answers, expected)
        differing.append(sum(bool(comparison.problem) for comparison in comparisons))
    return tuple(differing)


def open_pair_store(url: str, checkpoint: Path) -> FeatureStore:
    """The store of a running pair, for writing to it as its encoder does."""
    return open_feature_store(
        url=url,
        fingerprint=open_checkpoint(str(checkpoint)).fingerprint,
        ttl_seconds=TTL_SECONDS,
        timeout_seconds=10,
        connections=2,
        chunk_bytes=1024 * 1024,
    )


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    for place, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Over all tokens in either list; one that a list lacks counts with that list's smallest value."""
    floor_ours, floor_theirs = min(ours.values()), min(theirs.values())
    return max(abs(ours.get(token, floor_ours) - theirs.get(token, floor_theirs)) for token in ours | theirs)


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
        if condition.evidence <= 0:
            print("    this condition did not happen: it proves nothing")
    print(f"  distinct answers: {result.distinct_answers} of {result.requests}")
    for level, differing in enumerate(result.differing_by_level):
        print(f"  DeepStack level {level} zeroed: {differing} of {result.with_pictures} answers fail")
    print(f"{name}: {'verified' if result.has_passed else 'NOT VERIFIED'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="directory to verify")
    parser.add_argument("--generated", action="store_true", help="verify generated checkpoints of each kind")
    parser.add_argument("--requests", type=int, default=28, help="how many requests (default: 28)")
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
