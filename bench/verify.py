"""Compares the running pair with Transformers on the pixels: `make verify CHECKPOINT=dir`.

Float32, greedy, all requests in flight together. Token ids must be equal, and the log-probabilities of
the 20 best tokens at the first place nearly so. Where the reference's own two best logits are closer
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

from bench.generated_checkpoint import KINDS, write_generated_checkpoint
from bench.pair_client import PairAnswer, PairClient
from bench.reference import Reference, ReferenceAnswer
from bench.requests import VerifyRequest, verify_requests
from bench.stored_levels import StoredLevels
from demo.pair import DEMO_CHECKPOINT, Pair
from shared.checkpoint import open_checkpoint
from shared.store.redis_features import open_feature_store
from shared.store.store import FeatureStore

TIE_GAP = 1e-5
LOGPROB_TOLERANCE = 1e-3
FORCED_TOKENS = 16
# No feature may expire during a comparison.
TTL_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request's outcome: `problem` is empty when the pair equals the reference, ties aside."""

    name: str
    problem: str
    ties: int
    largest_difference: float


@dataclass(frozen=True, slots=True)
class Verification:
    """All requests' outcomes on one checkpoint, and how many answers differ after zeroing each level."""

    comparisons: tuple[Comparison, ...]
    distinct_answers: int
    differing_by_level: tuple[int, ...]
    with_pictures: int

    @property
    def verified(self) -> int:
        return sum(not comparison.problem for comparison in self.comparisons)

    @property
    def has_passed(self) -> bool:
        return (
            self.verified == len(self.comparisons)
            and 2 * self.distinct_answers >= len(self.comparisons)
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


async def verify(checkpoint: Path, count: int, seed: int, forced_tokens: int) -> Verification:
    """Starts the pair on `checkpoint`, asks `count` requests at once, and compares."""
    requests = verify_requests(count, seed, forced_tokens=forced_tokens)
    environment = {"LENSPAIR_DTYPE": "float32", "LENSPAIR_STORE_TTL_SECONDS": str(TTL_SECONDS)}
    with Pair(checkpoint, environment=environment) as pair:
        async with PairClient(pair.encoder.address, pair.decoder.address) as client:
            answers = await client.answer_all(requests)
            reference = Reference(checkpoint)
            expected = [
                reference.answer(r) for r in tqdm(requests, desc="reference", leave=False, disable=None)
            ]
            comparisons = await _compare_all(client, requests, answers, expected)
            pictured = [index for index, request in enumerate(requests) if request.images]
            store = open_pair_store(pair.store_url, checkpoint)
            differing = await zero_each_level(
                client, store, [requests[i] for i in pictured], [expected[i] for i in pictured]
            )
            await store.close()
    distinct = len({answer.token_ids for answer in expected})
    return Verification(comparisons, distinct, differing, len(pictured))


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
    total = len(result.comparisons)
    for comparison in result.comparisons:
        if comparison.problem:
            print(f"  {comparison.name}: {comparison.problem}")
    for level, differing in enumerate(result.differing_by_level):
        print(f"  DeepStack level {level} zeroed: {differing} of {result.with_pictures} answers fail")
    print(
        f"{name}: verified {result.verified} of {total}, "
        f"ties {sum(c.ties for c in result.comparisons)}, distinct answers {result.distinct_answers}, "
        f"largest log-probability difference {max(c.largest_difference for c in result.comparisons):.1e}"
    )
    if not result.has_passed:
        print(f"{name}: NOT VERIFIED")


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
    if not arguments.generated:
        result = asyncio.run(
            verify(arguments.checkpoint, arguments.requests, arguments.seed, arguments.forced_tokens)
        )
        _report(str(arguments.checkpoint), result)
        return 0 if result.has_passed else 1
    return _verify_generated(arguments.requests, arguments.seed)


def _verify_generated(requests: int, seed: int) -> int:
    passed = True
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="lenspair-") as folder:
            write_generated_checkpoint(Path(folder), kind, seed=seed)
            result = asyncio.run(verify(Path(folder), requests, seed, FORCED_TOKENS))
        _report(kind, result)
        passed = passed and result.has_passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
