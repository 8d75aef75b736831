"""What every feature store promises: run against memory and real servers."""

import asyncio
import dataclasses
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, get_args

import pytest
import safetensors.torch
import torch
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from shared.features.bundle import FeatureBundle
from shared.features.damage import DamageCause
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest, StoreDtype
from shared.features.seal import DamageSeal
from shared.pb.lenspair.store.v1.feature_pb2 import FeatureManifest
from shared.store.names import chunk_names, manifest_name, register_name
from shared.store.store import FeatureStore
from tests.contract.backends import TTL_SECONDS, Backend
from tests.feature_samples import make_bundle, make_clip, make_key, plain_fp8, same_bytes

KEY = make_key("a")
OTHER_KEY = make_key("b")


async def read(store: FeatureStore, key: FeatureKey = KEY) -> FeatureBundle | None:
    found = await store.look_up(key)
    return None if found is None else await store.fetch(found.manifest)


def damaged_count(cause: DamageCause) -> float:
    return REGISTRY.get_sample_value("lenspair_store_damaged_records_total", {"cause": cause.value}) or 0.0


def incomplete_count() -> float:
    return REGISTRY.get_sample_value("lenspair_store_incomplete_records_total") or 0.0


# --- what is put comes back -------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [16, 48, 1008, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
async def test_every_dtype_comes_back_bit_for_bit(
    backend: Backend, dtype: torch.dtype, chunk_bytes: int
) -> None:
    bundle = make_bundle(dtype)
    bundle.tensor[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 2])
    store = backend.open(chunk_bytes=chunk_bytes)
    stored = await store.put(KEY, bundle)
    fetched = await read(store)
    await store.close()
    assert fetched is not None
    assert same_bytes(fetched.tensor, bundle.tensor)
    assert stored.manifest.size_bytes == bundle.tensor.numel() * dtype.itemsize
    assert (fetched.modality, fetched.grid, fetched.timestamps) == (bundle.modality, bundle.grid, ())
    assert (fetched.hidden_size, fetched.deepstack_levels) == (24, 3)


@pytest.mark.parametrize("chunk_bytes", [16, 1008, 10**6])
@pytest.mark.parametrize("store_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
async def test_a_narrower_dtype_comes_back_as_the_nearest_values(
    backend: Backend, dtype: torch.dtype, store_dtype: StoreDtype, chunk_bytes: int
) -> None:
    """For every reader, whatever it writes itself."""
    bundle = make_bundle(dtype)
    writer = backend.open(chunk_bytes=chunk_bytes, store_dtype=store_dtype)
    stored = (await writer.put(KEY, bundle)).manifest
    await writer.close()
    if store_dtype == "fp8":
        assert (stored.dtype, stored.size_bytes) == ("float8_e4m3fn", 16 * 4 * (24 + 1))
        want = plain_fp8(bundle)
    else:
        assert (stored.dtype, stored.size_bytes) == ("bfloat16", 16 * 4 * 24 * 2)
        want = bundle.tensor.to(torch.bfloat16)
    for own_dtype in get_args(StoreDtype):
        reader = backend.open(store_dtype=own_dtype)
        fetched = await read(reader)
        await reader.close()
        assert fetched is not None
        assert same_bytes(fetched.tensor, want)
        assert fetched.size_bytes == stored.tensor_bytes


async def test_a_clip_keeps_its_times(store: FeatureStore) -> None:
    clip = make_clip()
    await store.put(KEY, clip)
    fetched = await read(store)
    assert fetched is not None
    assert fetched.timestamps == (0.25, 1.25)
    assert same_bytes(fetched.tensor, clip.tensor)


async def test_look_up_tells_what_put_told(store: FeatureStore) -> None:
    stored = await store.put(KEY, make_bundle())
    found = await store.look_up(KEY)
    assert found is not None
    assert found.manifest == stored.manifest
    assert abs((found.expires_at - stored.expires_at).total_seconds()) < 5


async def test_an_unknown_key_is_a_miss(store: FeatureStore) -> None:
    await store.put(OTHER_KEY, make_bundle())
    assert await store.look_up(KEY) is None


async def test_tenants_do_not_share(store: FeatureStore) -> None:
    await store.put(make_key("a", tenant="0"), make_bundle())
    assert await store.look_up(make_key("a", tenant="1")) is None
    assert await store.delete(make_key("a", tenant="1")) is False
    assert await store.look_up(make_key("a", tenant="0")) is not None


# --- lifetime ---------------------------------------------------------------------------------------


async def age(backend: Backend, share_left: float) -> None:
    for name in await backend.names():
        await backend.set_seconds_left(name, TTL_SECONDS * share_left)


@pytest.mark.parametrize("reading", ["look_up", "fetch"])
async def test_a_read_refreshes_the_whole_record(backend: Backend, store: FeatureStore, reading: str) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await age(backend, 0.4)
    await (store.look_up(KEY) if reading == "look_up" else store.fetch(manifest))
    names = await backend.names()
    assert {manifest_name(KEY), *chunk_names(manifest)} <= set(names)
    left = [await backend.seconds_left(name) for name in names]
    assert min(left) > 0.9 * TTL_SECONDS


async def test_reads_leave_a_young_record_alone(backend: Backend, store: FeatureStore) -> None:
    await store.put(KEY, make_bundle())
    await age(backend, 0.6)
    await read(store)
    left = [await backend.seconds_left(name) for name in await backend.names()]
    assert max(left) < 0.7 * TTL_SECONDS


async def test_an_expired_record_is_a_miss(backend: Backend, store: FeatureStore) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await age(backend, 0.00002)
    await asyncio.sleep(0.005)
    assert await store.look_up(KEY) is None
    assert await store.fetch(manifest) is None


async def test_delete_tells_whether_there_was_one(backend: Backend, store: FeatureStore) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    assert await store.delete(KEY) is True
    assert await backend.names() == []
    assert await store.fetch(manifest) is None
    assert await store.delete(KEY) is False


async def test_nothing_is_served_without_the_manifest(backend: Backend, store: FeatureStore) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await backend.remove(manifest_name(KEY))
    assert await store.look_up(KEY) is None
    assert await store.fetch(manifest) is None


@pytest.mark.parametrize("reading", ["look_up", "fetch"])
@pytest.mark.parametrize("index", [0, 1, -1])
async def test_a_missing_chunk_is_a_miss_and_the_rest_goes(
    backend: Backend, store: FeatureStore, reading: str, index: int
) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    before = incomplete_count()
    await backend.remove(chunk_names(manifest)[index])
    assert await (store.look_up(KEY) if reading == "look_up" else store.fetch(manifest)) is None
    assert incomplete_count() == before + 1
    assert await backend.names() == []


# --- damage and forgery: always a miss, counted, deleted ---------------------------------------------


Damage = Callable[[Backend, Manifest], Awaitable[None]]


def flip_manifest(position: float) -> Damage:
    async def damage(backend: Backend, manifest: Manifest) -> None:
        await flip(backend, manifest_name(KEY), position)

    return damage


def flip_chunk(index: int, position: float) -> Damage:
    async def damage(backend: Backend, manifest: Manifest) -> None:
        await flip(backend, chunk_names(manifest)[index], position)

    return damage


async def flip(backend: Backend, name: str, position: float) -> None:
    data = bytearray(await backend.read(name))
    data[int(position * (len(data) - 1))] ^= 0x10
    await backend.write(name, bytes(data))


async def swap_chunks(backend: Backend, manifest: Manifest) -> None:
    first, second, *_ = chunk_names(manifest)
    held = await backend.read(first)
    await backend.write(first, await backend.read(second))
    await backend.write(second, held)


def resize_chunk(change: Callable[[bytes], bytes]) -> Damage:
    async def damage(backend: Backend, manifest: Manifest) -> None:
        name = chunk_names(manifest)[-1]
        await backend.write(name, change(await backend.read(name)))

    return damage


def edit_manifest(*, reseal: bool, **fields: object) -> Damage:
    async def damage(backend: Backend, manifest: Manifest) -> None:
        sealed = await backend.read(manifest_name(KEY))
        message = FeatureManifest.FromString(sealed[:-16])
        for name, value in fields.items():
            setattr(message, name, value)
        payload = message.SerializeToString()
        sealed = DamageSeal().close(payload) if reseal else payload + sealed[-16:]
        await backend.write(manifest_name(KEY), sealed)

    return damage


def replace_manifest(data: bytes) -> Damage:
    async def damage(backend: Backend, manifest: Manifest) -> None:
        await backend.write(manifest_name(KEY), data)

    return damage


async def truncate_manifest(backend: Backend, manifest: Manifest) -> None:
    await backend.write(manifest_name(KEY), (await backend.read(manifest_name(KEY)))[:-1])


async def copy_other_record(backend: Backend, manifest: Manifest) -> None:
    await backend.write(manifest_name(KEY), await backend.read(manifest_name(OTHER_KEY)))


async def copy_other_record_with_chunks(backend: Backend, manifest: Manifest) -> None:
    for name in await backend.names():
        if str(OTHER_KEY) in name and name != register_name(OTHER_KEY):
            await backend.write(name.replace(str(OTHER_KEY), str(KEY)), await backend.read(name))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        pytest.param(flip_manifest(0), DamageCause.SEAL, id="first byte of the manifest flipped"),
        pytest.param(flip_manifest(0.5), DamageCause.SEAL, id="middle byte of the manifest flipped"),
        pytest.param(flip_manifest(1), DamageCause.SEAL, id="last byte of the manifest flipped"),
        *(
            pytest.param(
                flip_chunk(index, position), DamageCause.CHECKSUM, id=f"chunk {index} flipped at {position}"
            )
            for index in range(4)
            for position in (0, 0.5, 1)
        ),
        pytest.param(swap_chunks, DamageCause.CHECKSUM, id="chunks swapped"),
        pytest.param(resize_chunk(lambda data: data[:-1]), DamageCause.LENGTH, id="chunk cut by a byte"),
        pytest.param(
            resize_chunk(lambda data: data + b"\0"), DamageCause.LENGTH, id="chunk longer by a byte"
        ),
        pytest.param(
            edit_manifest(reseal=False, grid_h=4, grid_w=16), DamageCause.SEAL, id="header edited, old seal"
        ),
        pytest.param(
            edit_manifest(reseal=True, layout_version=2), DamageCause.VERSION, id="unknown layout version"
        ),
        pytest.param(
            edit_manifest(reseal=True, deepstack_levels=2), DamageCause.FIELDS, id="a DeepStack level missing"
        ),
        pytest.param(edit_manifest(reseal=True, token_count=15), DamageCause.FIELDS, id="token count edited"),
        pytest.param(edit_manifest(reseal=True, grid_h=16), DamageCause.FIELDS, id="grid edited"),
        pytest.param(edit_manifest(reseal=True, dtype="float32"), DamageCause.FIELDS, id="dtype edited"),
        pytest.param(
            edit_manifest(reseal=True, size_bytes=1 << 62), DamageCause.FIELDS, id="size beyond all memory"
        ),
        pytest.param(edit_manifest(reseal=True, key=str(OTHER_KEY)), DamageCause.KEY, id="key edited"),
        pytest.param(copy_other_record, DamageCause.KEY, id="other key's manifest copied in"),
        pytest.param(copy_other_record_with_chunks, DamageCause.KEY, id="other key's record copied in"),
        pytest.param(truncate_manifest, DamageCause.SEAL, id="manifest truncated"),
        pytest.param(replace_manifest(b""), DamageCause.SEAL, id="manifest empty"),
        pytest.param(
            replace_manifest(DamageSeal().close(b"")), DamageCause.VERSION, id="empty message, sealed"
        ),
        pytest.param(
            replace_manifest(DamageSeal().close(b"\xff" * 50)), DamageCause.SYNTAX, id="no message, sealed"
        ),
        pytest.param(
            replace_manifest(safetensors.torch.save({"x": torch.zeros(8)})[:-4]),
            DamageCause.SEAL,
            id="safetensors cut short",
        ),
        pytest.param(replace_manifest(bytes(2 * 1024**2)), DamageCause.SIZE, id="manifest of megabytes"),
    ],
)
async def test_damage_is_a_miss(
    backend: Backend, store: FeatureStore, damage: Damage, cause: DamageCause
) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await store.put(OTHER_KEY, make_bundle(seed=1))
    await damage(backend, manifest)
    before = damaged_count(cause)
    assert await read(store) is None
    assert damaged_count(cause) == before + 1
    assert manifest_name(KEY) not in await backend.names()
    await check_that_all_is_well(store)


async def check_that_all_is_well(store: FeatureStore) -> None:
    """After the damage: its neighbour is untouched, and the key can be written and read again."""
    neighbour = await read(store, OTHER_KEY)
    assert neighbour is not None
    assert same_bytes(neighbour.tensor, make_bundle(seed=1).tensor)
    await store.put(KEY, make_bundle())
    again = await read(store)
    assert again is not None
    assert same_bytes(again.tensor, make_bundle().tensor)


async def test_damaged_chunks_are_deleted_with_their_manifest(backend: Backend, store: FeatureStore) -> None:
    manifest = (await store.put(KEY, make_bundle())).manifest
    await flip(backend, chunk_names(manifest)[0], 0.5)
    assert await read(store) is None
    assert await backend.names() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
async def test_values_that_are_no_numbers_are_a_miss(
    backend: Backend, store: FeatureStore, dtype: torch.dtype, value: float
) -> None:
    bundle = make_bundle(dtype)
    bundle.tensor[7] = value
    await store.put(KEY, bundle)
    before = damaged_count(DamageCause.NOT_FINITE)
    assert await read(store) is None
    assert damaged_count(DamageCause.NOT_FINITE) == before + 1
    assert await backend.names() == []


def forge_byte(chunk: int, position: int, value: int) -> Damage:
    """Another byte in a chunk, and a manifest that fits."""

    async def damage(backend: Backend, manifest: Manifest) -> None:
        name = chunk_names(manifest)[chunk]
        data = bytearray(await backend.read(name))
        data[position] = value
        await backend.write(name, bytes(data))
        message = FeatureManifest.FromString((await backend.read(manifest_name(KEY)))[:-16])
        message.chunk_checksums[chunk] = DamageSeal().checksum(data)
        await backend.write(manifest_name(KEY), DamageSeal().close(message.SerializeToString()))

    return damage


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        pytest.param(forge_byte(0, 0, 0x7F), DamageCause.NOT_FINITE, id="first value NaN"),
        pytest.param(forge_byte(1, 527, 0xFF), DamageCause.NOT_FINITE, id="last value negative NaN"),
        pytest.param(forge_byte(1, 528, 120), DamageCause.NOT_FINITE, id="first scale too large"),
        pytest.param(forge_byte(1, -1, 127), DamageCause.NOT_FINITE, id="last scale as large as can be"),
        pytest.param(forge_byte(1, -1, 256 - 125), DamageCause.NOT_FINITE, id="last scale too small"),
        pytest.param(forge_byte(1, -1, 128), DamageCause.NOT_FINITE, id="last scale as small as can be"),
        pytest.param(flip_chunk(1, 1), DamageCause.CHECKSUM, id="last scale flipped"),
        pytest.param(resize_chunk(lambda data: data[:-64]), DamageCause.LENGTH, id="scales cut off"),
        pytest.param(
            edit_manifest(reseal=True, size_bytes=16 * 4 * 24), DamageCause.FIELDS, id="size without scales"
        ),
        pytest.param(
            edit_manifest(reseal=True, hidden_size=25), DamageCause.FIELDS, id="scales counted as values"
        ),
        pytest.param(
            edit_manifest(reseal=True, dtype="float8_e5m2"), DamageCause.FIELDS, id="another dtype of 8 bits"
        ),
        pytest.param(edit_manifest(reseal=True, dtype="bfloat16"), DamageCause.FIELDS, id="dtype edited"),
    ],
)
async def test_damaged_fp8_is_a_miss(backend: Backend, damage: Damage, cause: DamageCause) -> None:
    store = backend.open(store_dtype="fp8")
    manifest = (await store.put(KEY, make_bundle())).manifest
    assert await store.look_up(KEY) is not None
    before = damaged_count(cause)
    await damage(backend, manifest)
    assert await read(store) is None
    assert damaged_count(cause) == before + 1
    assert manifest_name(KEY) not in await backend.names()
    await store.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("store_dtype", ["bfloat16", "fp8"])
async def test_no_rounding_hides_what_is_no_number(
    backend: Backend, store_dtype: StoreDtype, dtype: torch.dtype, value: float
) -> None:
    bundle = make_bundle(dtype)
    bundle.tensor[7, 3] = value
    store = backend.open(store_dtype=store_dtype)
    await store.put(KEY, bundle)
    before = damaged_count(DamageCause.NOT_FINITE)
    assert await read(store) is None
    assert damaged_count(DamageCause.NOT_FINITE) == before + 1
    await store.close()


class Bomb:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[Path], Self], tuple[Path]]:
        return (Path.touch, (self.marker,))  # type: ignore[return-value]


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_pickle_under_a_valid_key_is_never_run(
    backend: Backend, store: FeatureStore, tmp_path: Path, sealed: bool
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "marker"))
    await backend.write(manifest_name(KEY), DamageSeal().close(bomb) if sealed else bomb)
    assert await read(store) is None
    manifest = (await store.put(KEY, make_bundle())).manifest
    await backend.write(chunk_names(manifest)[0], bomb.ljust(1000, b"."))
    assert await read(store) is None
    assert not (tmp_path / "marker").exists()


# --- with a store key -------------------------------------------------------------------------------


@pytest.mark.parametrize("forger_key", [None, b"another key"])
async def test_records_sealed_without_the_store_key_are_misses(
    backend: Backend, forger_key: bytes | None
) -> None:
    forger, reader = backend.open(store_key=forger_key), backend.open(store_key=b"the store key")
    await forger.put(KEY, make_bundle())
    before = damaged_count(DamageCause.SEAL)
    with capture_logs() as logs:
        assert await read(reader) is None
    assert damaged_count(DamageCause.SEAL) == before + 1
    assert "LENSPAIR_STORE_KEY" in logs[0]["cause"]
    await forger.close()
    await reader.close()


async def test_a_genuine_record_can_not_be_altered_without_the_store_key(backend: Backend) -> None:
    store = backend.open(store_key=b"the store key")
    manifest = (await store.put(KEY, make_bundle())).manifest
    assert await read(store) is not None
    name = chunk_names(manifest)[0]
    await flip(backend, name, 0.5)
    forged = FeatureManifest.FromString((await backend.read(manifest_name(KEY)))[:-32])
    seal = DamageSeal()
    forged.chunk_checksums[0] = seal.checksum(await backend.read(name)).ljust(32, b"\0")
    await backend.write(manifest_name(KEY), seal.close(forged.SerializeToString()))
    assert await read(store) is None
    await store.close()


# --- several at once --------------------------------------------------------------------------------


async def test_writers_of_one_key_never_mix(backend: Backend) -> None:
    """Two computations of one key may differ in the last bits: readers see the one or the other."""
    stores = [backend.open(chunk_bytes=112), backend.open(chunk_bytes=704)]
    bundles = [make_bundle(seed=0), make_bundle(seed=1)]
    await stores[0].put(KEY, bundles[0])
    writing = asyncio.gather(*(stores[turn % 2].put(KEY, bundles[turn % 2]) for turn in range(20)))
    for _ in range(20):
        fetched = await read(stores[0])
        assert fetched is not None
        assert any(same_bytes(fetched.tensor, bundle.tensor) for bundle in bundles)
    await writing
    for store in stores:
        await store.close()


async def test_damage_of_an_old_write_leaves_the_new_one_alone(backend: Backend, store: FeatureStore) -> None:
    old = (await store.put(KEY, make_bundle(seed=0))).manifest
    await flip(backend, chunk_names(old)[0], 0.5)
    await store.put(KEY, make_bundle(seed=1))
    assert await store.fetch(old) is None
    fetched = await read(store)
    assert fetched is not None
    assert same_bytes(fetched.tensor, make_bundle(seed=1).tensor)


async def test_many_keys_at_once(store: FeatureStore) -> None:
    keys = [make_key(name) for name in "0123456789abcdef"]
    await asyncio.gather(*(store.put(key, make_bundle(seed=seed)) for seed, key in enumerate(keys)))
    fetched = await asyncio.gather(*(read(store, key) for key in keys))
    for seed, bundle in enumerate(fetched):
        assert bundle is not None
        assert same_bytes(bundle.tensor, make_bundle(seed=seed).tensor)


async def test_a_bundle_that_nobody_could_read_is_refused(backend: Backend, store: FeatureStore) -> None:
    timeless = dataclasses.replace(make_clip(), timestamps=())
    with pytest.raises(ValueError, match="fields"):
        await store.put(KEY, timeless)
    assert await backend.names() == []


async def test_ping_returns(store: FeatureStore) -> None:
    await store.ping()


# --- metrics ----------------------------------------------------------------------------------------


def operations(operation: str, outcome: str) -> float:
    labels = {"operation": operation, "outcome": outcome}
    return REGISTRY.get_sample_value("lenspair_store_operations_total", labels) or 0.0


def moved_bytes(direction: str) -> float:
    return REGISTRY.get_sample_value(f"lenspair_store_{direction}_bytes_total") or 0.0


async def test_operations_and_bytes_are_counted(store: FeatureStore) -> None:
    kinds = [("look_up", "miss"), ("put", "done"), ("look_up", "hit"), ("fetch", "hit"), ("delete", "done")]
    before = [operations(*kind) for kind in kinds]
    written, read_before = moved_bytes("written"), moved_bytes("read")
    await store.look_up(KEY)
    await store.put(KEY, make_bundle())
    await read(store)
    await store.delete(KEY)
    assert [operations(*kind) for kind in kinds] == [count + 1 for count in before]
    assert moved_bytes("written") - written == moved_bytes("read") - read_before == 3072
