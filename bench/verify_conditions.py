"""Under which conditions the pair is compared: how requests come, and how narrow the decoder is."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.pair_client import PairAnswer, PairClient
from bench.requests import VerifyRequest

Answers = list[tuple[int, PairAnswer]]
"""The number of a request, and its answer; requests that were cancelled have none."""

Asking = Callable[[PairClient, Sequence[VerifyRequest]], Awaitable[Answers]]

IN_FLIGHT = 64
ARRIVAL_SECONDS = 2.0
MOST_PATIENCE_SECONDS = 0.06
_REUSED = "lenspair_decoder_reused_tokens_total"
_SINGLE_STEPS = "lenspair_decoder_step_seconds_count{mode=single}"
_WAITED = "lenspair_decoder_request_queue_time_seconds_sum"
WINDOW_SECONDS = 0.15
NUM_LONG, LONG_TOKENS = 6, 200
# The least that a decoder starts with, so that answers run out of blocks.
CACHE_BLOCKS = 32
SMALLEST_CACHE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Condition:
    """`evidence` is the metric that must rise by more than so much: else the condition did not happen."""

    name: str
    ask: Asking
    evidence: str = "lenspair_decoder_answers_total"
    more_than: float = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a pair, and the conditions that are tried on it in turn."""

    conditions: tuple[Condition, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


async def together(client: PairClient, requests: Sequence[VerifyRequest]) -> Answers:
    """All requests in flight together."""
    return list(enumerate(await client.answer_all(requests)))


async def in_turn(client: PairClient, requests: Sequence[VerifyRequest]) -> Answers:
    """Each when the one before it is answered: what it shares with that one, it finds in the cache."""
    return [(number, await client.answer(request)) for number, request in enumerate(requests)]


async def at_random(client: PairClient, requests: Sequence[VerifyRequest]) -> Answers:
    """Many in flight, each from a moment of its own on; a third is cancelled at some moment."""
    rng = random.Random(0)

    async def ask(number: int) -> tuple[int, PairAnswer] | None:
        which = number % len(requests)
        await asyncio.sleep(rng.random() * ARRIVAL_SECONDS)
        patience = rng.random() * MOST_PATIENCE_SECONDS if number % 3 == 0 else None
        try:
            async with asyncio.timeout(patience):
                return which, await client.answer(requests[which])
        except TimeoutError:
            return None

    answers = await asyncio.gather(*map(ask, range(IN_FLIGHT)))
    return [answer for answer in answers if answer is not None]


async def beside_long_answers(client: PairClient, requests: Sequence[VerifyRequest]) -> Answers:
    """All requests together, while long answers grow and take one block after the other."""
    long = [
        asyncio.create_task(client.step_intervals(f"Tell me something long. ({number})", LONG_TOKENS))
        for number in range(NUM_LONG)
    ]
    answers = await together(client, requests)
    await asyncio.gather(*long)
    return answers


def setups(checkpoint: Path) -> tuple[Setup, ...]:
    """All of them; the first one's pair stands as it does for everyone."""
    cache_bytes = max(SMALLEST_CACHE_BYTES, CACHE_BLOCKS * _block_bytes(checkpoint))
    window = {"LENSPAIR_BATCH_WINDOW_MS": str(1000 * WINDOW_SECONDS), "LENSPAIR_MIN_BATCH_SIZE": "4"}
    return (
        Setup(
            (
                Condition("all at once", together),
                Condition("asked again", together, _REUSED),
                Condition("one after the other", in_turn, _REUSED),
                Condition("64 in flight, a third cancelled", at_random, "lenspair_decoder_abandoned_total"),
            )
        ),
        Setup(
            (Condition("a small cache", beside_long_answers, "lenspair_decoder_preemptions_total"),),
            {"LENSPAIR_KV_CACHE_BYTES": str(cache_bytes)},
        ),
        Setup(
            (Condition("chunks of 37 tokens", together), Condition("and asked again", together, _REUSED)),
            {"LENSPAIR_MAX_BATCH_TOKENS": "37"},
        ),
        Setup((Condition("one at a time", together, _SINGLE_STEPS),), {"LENSPAIR_MODE": "single"}),
        Setup((Condition("an admission window", at_random, _WAITED, WINDOW_SECONDS),), window),
    )


def _block_bytes(checkpoint: Path) -> int:
    """Bytes of a block of the KV cache in float32."""
    text = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
    return int(text["num_hidden_layers"] * 2 * text["num_key_value_heads"] * text["head_dim"] * 16 * 4)
