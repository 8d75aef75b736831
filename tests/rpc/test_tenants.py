"""What a tenant learns of another one, and what a strange key gets: nothing (C12, C14)."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from decoder_service.prompt import PromptBuilder
from demo.pair import DEMO_CHECKPOINT
from encoder_service.preprocess import ImagePreprocessor
from shared.checkpoint import open_checkpoint
from shared.features.key import FeatureKey, tenant_tag
from shared.features.seal import DamageSeal
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.pb.lenspair.store.v1.feature_pb2 import FeatureManifest
from shared.store.memory import MemoryValue
from shared.store.names import manifest_name
from tests.rpc.pair import METHODS, ServedPair, a_pair, status_of
from tests.rpc.servers import failure_of
from tests.unit.encoder.samples import solid

RED = solid("red")
BLUE = solid("blue", 128, 64)


@pytest.fixture(scope="module")
def preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path(DEMO_CHECKPOINT))


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT)))


@pytest.fixture
async def pair(preprocessor: ImagePreprocessor, prompts: PromptBuilder) -> AsyncIterator[ServedPair]:
    async with a_pair(preprocessor, prompts) as served:
        yield served


def store_operations() -> float:
    """How often any store was asked for anything."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        if family.name == "lenspair_store_operations"
        for sample in family.samples
        if sample.name.endswith("_total")
    )


async def key_of(pair: ServedPair, data: bytes, tenant: str | None) -> str:
    """The key of a picture, which the store has for this tenant from here on."""
    return str((await pair.encode(data, tenant)).feature.key)


def random_key(tenant: str) -> str:
    """A key of the tenant's own that nobody has ever stored."""
    return str(FeatureKey(tenant_tag(tenant), "7" * 64, "7" * 64))


# --- C14: one tenant sees nothing of another ----------------------------------------------------------


async def test_what_one_tenant_has_encoded_is_encoded_again_for_another(pair: ServedPair) -> None:
    answers = [await pair.encode(RED, tenant) for tenant in ("a", "b", None, "a")]
    assert [answer.outcome for answer in answers] == [*[pb.OUTCOME_ENCODED] * 3, pb.OUTCOME_HIT]
    assert len({answer.feature.key for answer in answers}) == 3


async def test_a_look_up_of_what_another_tenant_has_misses(pair: ServedPair) -> None:
    await pair.encode(RED, "a")
    results = [await pair.look_up(hashlib.sha256(RED).digest(), tenant) for tenant in ("b", None, "a")]
    assert [answer.results[0].HasField("feature") for answer in results] == [False, False, True]


async def test_a_tenant_does_not_join_the_work_for_another(pair: ServedPair) -> None:
    pair.tower.gate.clear()
    calls = [asyncio.ensure_future(pair.encode(RED, tenant)) for tenant in ("a", "a", "b")]
    await asyncio.to_thread(pair.tower.entered.wait, 10)
    pair.tower.gate.set()
    answers = await asyncio.gather(*calls)
    outcomes = [answer.outcome for answer in answers]
    assert sorted(outcomes[:2]) == [pb.OUTCOME_ENCODED, pb.OUTCOME_JOINED]
    assert outcomes[2] == pb.OUTCOME_ENCODED
    assert sum(pair.tower.passes) == 2


@pytest.mark.parametrize("method", METHODS)
async def test_a_foreign_key_is_answered_like_a_missing_one_byte_by_byte(
    pair: ServedPair, method: str
) -> None:
    foreign, missing = await key_of(pair, RED, "a"), random_key("b")
    await pair.ask(method, foreign, tenant="a")  # it is there, and in the decoder's memory
    seen = await pair.refused(method, foreign, tenant="b")
    expected = await pair.refused(method, missing, tenant="b")
    assert missing.encode() in expected.SerializeToString()
    assert seen.SerializeToString() == expected.SerializeToString().replace(
        missing.encode(), foreign.encode()
    )


@pytest.mark.parametrize("method", METHODS)
async def test_a_foreign_key_never_reaches_the_store(pair: ServedPair, method: str) -> None:
    foreign = await key_of(pair, RED, "a")
    before = store_operations()
    await pair.refused(method, foreign, tenant="b")
    await pair.refused(method, foreign)
    assert store_operations() == before


async def test_foreign_and_missing_keys_of_one_question_are_listed_alike(pair: ServedPair) -> None:
    foreign, own, missing = await key_of(pair, RED, "a"), await key_of(pair, RED, "b"), random_key("b")
    seen = (await pair.refused("Generate", missing, own, foreign, tenant="b")).SerializeToString()
    assert f"{missing},{foreign}".encode() in seen
    assert own.encode() not in seen


async def test_a_foreign_key_under_ones_own_tag_is_ones_own_key(pair: ServedPair) -> None:
    """It names the same content for the other tenant, who has not stored it."""
    foreign = await key_of(pair, RED, "a")
    pasted = tenant_tag("b") + foreign[64:]
    failure = await failure_of(pair.ask("Generate", pasted, tenant="b"))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")
    assert await key_of(pair, RED, "b") == pasted
    await pair.ask("Generate", pasted, tenant="b")


@pytest.mark.parametrize("pasted", ["{tag}.{key}", "{tag}{key}", "{key}.{tag}", "{tag}", "{key}\n{tag}"])
async def test_a_tag_pasted_around_a_foreign_key_makes_no_key(pair: ServedPair, pasted: str) -> None:
    foreign = await key_of(pair, RED, "a")
    strange = pasted.format(tag=tenant_tag("b"), key=foreign)
    failure = await failure_of(pair.ask("Generate", strange, tenant="b"))
    assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "MALFORMED_FEATURE_KEY")


async def test_names_and_tags_of_tenants_are_in_no_metric(pair: ServedPair) -> None:
    key = await key_of(pair, RED, "a-rather-special-tenant")
    await pair.ask("Generate", key, tenant="a-rather-special-tenant")
    labels = {
        str(value)
        for family in REGISTRY.collect()
        for sample in family.samples
        for value in sample.labels.values()
    }
    secrets = ("a-rather-special-tenant", *key.split("."))
    assert not [label for label in labels if any(secret in label for secret in secrets)]


@pytest.mark.parametrize("tenant", ["", "two words", "x" * 129])
async def test_what_can_not_be_a_tenant_is_refused_by_both_services(pair: ServedPair, tenant: str) -> None:
    for call in (pair.encode(RED, tenant), pair.ask("Generate", random_key("a"), tenant=tenant)):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert failure.field == "metadata.x-tenant"


async def test_where_a_tenant_is_required_nothing_is_done_without_one(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder
) -> None:
    async with a_pair(preprocessor, prompts, require_tenant=True) as pair:
        calls: list[Any] = [pair.encode(RED), pair.look_up(bytes(32))]
        calls += [pair.ask(method, random_key("")) for method in METHODS]
        for call in calls:
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == ("UNAUTHENTICATED", "TENANT_REQUIRED")
        assert (pair.values, pair.tower.passes, pair.engine.requests) == ({}, [], [])
        await pair.ask("Generate", await key_of(pair, RED, "a"), tenant="a")


# --- C12: a key from a caller is believed in nothing --------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "key",
    ["", "x" * 1_000_000, f"{'a' * 64}\r\nDEL x", f"{random_key('')}\r\n", "../../etc/passwd", "\x00", "*"],
    ids=["empty", "1 MB", "CR LF inside", "CR LF behind", "path", "NUL", "pattern"],
)
async def test_what_is_no_key_is_refused_and_not_repeated(pair: ServedPair, key: str, method: str) -> None:
    before = store_operations()
    status = await pair.refused(method, key)
    assert status.code == 3
    assert b"MALFORMED_FEATURE_KEY" in status.SerializeToString()
    assert len(status.SerializeToString()) < 1000
    assert store_operations() == before
    assert not pair.engine.requests


@pytest.mark.parametrize("method", METHODS)
async def test_an_unknown_key_is_not_found(pair: ServedPair, method: str) -> None:
    failure = await failure_of(pair.ask(method, random_key("")))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")
    assert not pair.engine.requests


async def claim_another_grid(pair: ServedPair, key: FeatureKey) -> None:
    value = pair.values[manifest_name(key)]
    manifest = FeatureManifest.FromString(value.data[:-16])
    manifest.grid_h *= 2
    value.data = DamageSeal().close(manifest.SerializeToString())


async def claim_more_tokens_too(pair: ServedPair, key: FeatureKey) -> None:
    value = pair.values[manifest_name(key)]
    manifest = FeatureManifest.FromString(value.data[:-16])
    manifest.grid_h *= 2
    manifest.token_count *= 2
    manifest.size_bytes *= 2
    value.data = DamageSeal().close(manifest.SerializeToString())


async def take_the_record_of_another(pair: ServedPair, key: FeatureKey) -> None:
    """Of another picture, with another grid."""
    other = FeatureKey.parse(await key_of(pair, BLUE, None))
    for name, value in tuple(pair.values.items()):
        if str(other) in name:
            pair.values[name.replace(str(other), str(key))] = MemoryValue(value.data, value.expires_at)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("forge", [claim_another_grid, claim_more_tokens_too, take_the_record_of_another])
async def test_a_key_whose_record_claims_another_grid_is_not_found(
    pair: ServedPair, forge: Any, method: str
) -> None:
    key = FeatureKey.parse(await key_of(pair, RED, None))
    await forge(pair, key)
    failure = await failure_of(pair.ask(method, str(key)))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")
    assert not pair.engine.requests
    # Encoding again is all that it takes.
    assert (await pair.encode(RED)).outcome == pb.OUTCOME_ENCODED
    await pair.ask(method, str(key))


# --- C07: what is stored and asked about is one picture, not a list -----------------------------------


async def test_pictures_are_reused_in_any_list_and_order(pair: ServedPair) -> None:
    first, second = await key_of(pair, RED, None), await key_of(pair, BLUE, None)
    for keys in ([first], [first, second], [second, first], [first, first]):
        await pair.ask("Generate", *keys)
        tokens = [bundle.token_count for bundle in pair.engine.features[-1]]
        assert tokens == [{first: 4, second: 8}[key] for key in keys]
    assert await key_of(pair, RED, None) == first
    assert pair.tower.passes == [1, 1]


# --- C21: nobody remembers what the store has forgotten -----------------------------------------------


@pytest.mark.parametrize("method", METHODS)
async def test_after_a_flush_all_is_encoded_again(pair: ServedPair, method: str) -> None:
    key = await key_of(pair, RED, None)
    await pair.ask("Generate", key)
    pair.values.clear()
    assert (await status_of(pair.ask(method, key))).code == 5
    assert (await pair.encode(RED)).outcome == pb.OUTCOME_ENCODED
    await pair.ask(method, key)
