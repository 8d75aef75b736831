"""One answer of the pair against the reference's: token ids, ties, log-probabilities at the first place."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.pair_client import PairAnswer, PairClient
from bench.reference import ReferenceAnswer
from bench.requests import VerifyRequest

TIE_GAP = 1e-5
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request's outcome: `problem` is empty when the pair equals the reference, ties aside."""

    name: str
    problem: str
    ties: int
    largest_difference: float


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


async def compare_all(
    client: PairClient,
    requests: Sequence[VerifyRequest],
    answers: Sequence[PairAnswer],
    expected: Sequence[ReferenceAnswer],
) -> tuple[Comparison, ...]:
    return tuple([await compare(client, *each) for each in zip(requests, answers, expected, strict=True)])


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    for place, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        if left != right:
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _largest_difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Over all tokens in either list; one that a list lacks counts with that list's smallest value.

    An answer that ends at once has no first token of ours to compare: its end is compared as a token.
    """
    if not ours:
        return 0.0
    floor_ours, floor_theirs = min(ours.values()), min(theirs.values())
    return max(abs(ours.get(token, floor_ours) - theirs.get(token, floor_theirs)) for token in ours | theirs)
