"""The use case on real pictures, with a fake tower and a store in memory."""

import asyncio
import hashlib
import time
from collections.abc import Sequence

import pytest
import torch
from PIL import Image

from encoder_service.media_settings import RequestedSettings
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import Digests, Encoded, MediumQuery, Outcome
from encoder_service.tower import Patches
from shared.errors import (
    DeadlineExceeded,
    InvalidMedia,
    InvalidMediaSettings,
    LenspairError,
    MediaTooLarge,
    QueueFull,
)
from shared.features.key import Modality, tenant_tag
from tests.unit.encoder.harness import TENANT, Harness, a_store, an_encoder, picture
from tests.unit.encoder.samples import declared_png, encoded, noise, solid


def keys(*results: Encoded) -> set[str]:
    return {str(result.feature.manifest.key) for result in results}


async def encode(harness: Harness, *data: bytes) -> list[Encoded]:
    return list(await asyncio.gather(*(harness.service.encode(picture(one)) for one in data)))


async def fetched_value(harness: Harness, result: Encoded) -> float:
    bundle = await harness.store.fetch(result.feature.manifest)
    assert bundle is not None
    return float(bundle.tensor[0, 0])


async def test_a_picture_is_encoded_once_and_then_found(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        data = solid("red", 100, 50)
        first = await harness.service.encode(picture(data))
        harness.intake.close()  # from here on nothing can be decoded
        second = await harness.service.encode(picture(data))
    assert (first.outcome, second.outcome) == (Outcome.ENCODED, Outcome.HIT)
    assert first.feature.manifest == second.feature.manifest
    assert harness.tower.passes == [1]
    grid = first.feature.manifest.grid
    assert (grid.t, grid.h, grid.w, first.feature.manifest.token_count) == (1, 4, 6, 6)


# C01, C02, C16, C17
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            encoded(Image.frombytes("RGB", (6, 4), bytes(range(72)))),
            encoded(Image.frombytes("RGB", (4, 6), bytes(range(72)))),
            id="other-shape",
        ),
        pytest.param(solid("blue", 640, 360), solid("white", 640, 360), id="solid-colours"),
        pytest.param(solid("red", 320, 320), solid((76, 76, 76), 320, 320), id="equal-brightness"),
    ],
)
async def test_different_pictures_have_different_keys(
    demo_preprocessor: ImagePreprocessor, one: bytes, other: bytes
) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        results = await encode(harness, one, other)
    assert len(keys(*results)) == 2


# C02
async def test_palettes_count(demo_preprocessor: ImagePreprocessor) -> None:
    pictures = []
    for colour in ([255, 0, 0], [0, 0, 255]):
        image = Image.new("P", (64, 64), 0)
        image.putpalette(colour)
        pictures.append(encoded(image))
    async with an_encoder(demo_preprocessor) as harness:
        red, blue = await encode(harness, *pictures)
        assert len(keys(red, blue)) == 2


# C08
async def test_effective_settings_decide_the_key(demo_preprocessor: ImagePreprocessor) -> None:
    data = encoded(noise(256, 256), "JPEG")
    wishes = [
        RequestedSettings(),
        RequestedSettings(min_pixels=4096, max_pixels=65_536),
        RequestedSettings(max_pixels=20_000),
        RequestedSettings(do_resize=False),
    ]
    async with an_encoder(demo_preprocessor) as harness:
        results = [await harness.service.encode(picture(data, wish)) for wish in wishes]
    assert [result.outcome for result in results] == [
        Outcome.ENCODED,
        Outcome.HIT,
        Outcome.ENCODED,
        Outcome.ENCODED,
    ]
    assert len(keys(*results)) == 3
    assert results[2].settings.max_pixels == 20_000
    assert results[2].feature.manifest.grid.h * 16 * results[2].feature.manifest.grid.w * 16 <= 20_000


# C09, C14
async def test_models_and_tenants_share_nothing(demo_preprocessor: ImagePreprocessor) -> None:
    data, store = solid("red"), a_store()
    results = []
    for model, tenant in (("a", ""), ("b", ""), ("a", "somebody")):
        async with an_encoder(demo_preprocessor, store=store, model=model) as harness:
            results.append(await harness.service.encode(picture(data, tenant=tenant_tag(tenant))))
    assert [result.outcome for result in results] == [Outcome.ENCODED] * 3
    assert len(keys(*results)) == 3


# C11
async def test_the_content_decides_not_where_it_came_from(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        before, after = [(await encode(harness, solid(colour)))[0] for colour in ("white", "black")]
        assert await fetched_value(harness, before) == 2.0
        assert await fetched_value(harness, after) == 0.0


# C21
async def test_a_flushed_store_is_filled_again(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        await encode(harness, solid("red"))
        harness.store.values.clear()
        again = (await encode(harness, solid("red")))[0]
        assert again.outcome is Outcome.ENCODED
        assert await harness.store.fetch(again.feature.manifest) is not None


# C23
async def test_sixteen_at_once_run_the_tower_once(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        results = await encode(harness, *[solid("red")] * 16)
    assert harness.tower.passes == [1]
    assert len(keys(*results)) == 1
    assert sorted(result.outcome for result in results) == [Outcome.ENCODED] + [Outcome.JOINED] * 15


# C23
async def test_two_encoders_on_one_store_agree_on_one_key(demo_preprocessor: ImagePreprocessor) -> None:
    store = a_store()
    async with (
        an_encoder(demo_preprocessor, store=store) as one,
        an_encoder(demo_preprocessor, store=store) as other,
    ):
        results = await asyncio.gather(*(encode(each, *[solid("red")] * 8) for each in (one, other)))
        assert len(keys(*results[0], *results[1])) == 1
        assert [each.tower.passes for each in (one, other)] in ([[1], [1]], [[1], []], [[], [1]])
        assert await store.fetch(results[0][0].feature.manifest) is not None


async def test_a_leader_who_leaves_does_not_fail_the_others(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        harness.tower.gate.clear()
        calls = [asyncio.create_task(harness.service.encode(picture(solid("red")))) for _ in range(3)]
        await asyncio.to_thread(harness.tower.entered.wait, 10)
        calls[0].cancel()
        await asyncio.sleep(0)
        harness.tower.gate.set()
        others = await asyncio.gather(*calls[1:])
    assert [other.outcome for other in others] == [Outcome.JOINED] * 2
    assert harness.tower.passes == [1]


# B06
async def test_a_deadline_ends_one_call_not_the_work_of_others(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        harness.tower.gate.clear()
        patient = asyncio.create_task(harness.service.encode(picture(solid("red"))))
        await asyncio.sleep(0)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await harness.service.encode(picture(solid("red"), seconds=0.2))
        assert 0.15 <= time.monotonic() - started <= 0.5
        harness.tower.gate.set()
        assert (await patient).outcome is Outcome.ENCODED


# I09, I12, I14, I16, I17, I24: nothing is stored, and the next picture is served
@pytest.mark.parametrize(
    ("data", "settings", "error"),
    [
        (b"", RequestedSettings(), InvalidMedia),
        (b"/etc/hostname", RequestedSettings(), InvalidMedia),
        (encoded(noise(), "JPEG")[:-128], RequestedSettings(), InvalidMedia),
        (encoded(Image.new("RGB", (1093, 5))), RequestedSettings(), InvalidMedia),
        (declared_png(20_000, 20_000), RequestedSettings(), MediaTooLarge),
        (bytes(9_000_000), RequestedSettings(), MediaTooLarge),
        (solid("red"), RequestedSettings(min_pixels=60_000, max_pixels=50_000), InvalidMediaSettings),
        (solid("red", 28, 28), RequestedSettings(max_pixels=10_000_000), InvalidMediaSettings),
        (solid("red", 65, 64), RequestedSettings(do_resize=False), InvalidMedia),
        (solid("red", 512, 512), RequestedSettings(do_resize=False), MediaTooLarge),
    ],
)
async def test_bad_input_leaves_nothing_behind(
    demo_preprocessor: ImagePreprocessor,
    data: bytes,
    settings: RequestedSettings,
    error: type[LenspairError],
) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        with pytest.raises(error):
            await harness.service.encode(picture(data, settings))
        assert harness.store.values == {}
        assert harness.tower.passes == []
        assert (await encode(harness, solid("red")))[0].outcome is Outcome.ENCODED


# B01
async def test_a_bad_picture_does_not_fail_its_neighbours(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        data = [solid("red"), b"junk", solid("blue"), encoded(noise())[:-200]]
        calls = (harness.service.encode(picture(one)) for one in data)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Encoded, InvalidMedia, Encoded, InvalidMedia]


async def test_features_that_are_not_finite_are_never_stored(demo_preprocessor: ImagePreprocessor) -> None:
    def spoil(_: Sequence[Patches], features: torch.Tensor) -> None:
        features.fill_(float("inf"))

    async with an_encoder(demo_preprocessor) as harness:
        harness.tower.spoil = spoil
        with pytest.raises(LenspairError, match="finite"):
            await harness.service.encode(picture(solid("red")))
        assert harness.store.values == {}


# B09
async def test_a_full_queue_refuses_at_once(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor, max_queue_items=8) as harness:
        harness.tower.gate.clear()
        busy = asyncio.create_task(harness.service.encode(picture(solid("white"))))
        await asyncio.to_thread(harness.tower.entered.wait, 10)
        calls = [
            asyncio.create_task(harness.service.encode(picture(solid((index, 0, 0))))) for index in range(30)
        ]
        done, waiting = await asyncio.wait(calls, timeout=1.0)
        assert (len(done), len(waiting)) == (22, 8)
        assert all(isinstance(call.exception(), QueueFull) for call in done)
        harness.tower.gate.set()
        await asyncio.gather(busy, *waiting)


async def test_look_up_finds_without_bytes(demo_preprocessor: ImagePreprocessor) -> None:
    async with an_encoder(demo_preprocessor) as harness:
        data = solid("red")
        stored = await harness.service.encode(picture(data))
        sha256 = hashlib.sha256(data).digest()
        spelt_out = RequestedSettings(max_pixels=65_536)
        found = await harness.service.look_up(
            [
                MediumQuery(TENANT, Digests(Modality.IMAGE, sha256), spelt_out),
                MediumQuery(TENANT, Digests(Modality.IMAGE, sha256), RequestedSettings(max_pixels=9000)),
                MediumQuery(tenant_tag("another"), Digests(Modality.IMAGE, sha256), RequestedSettings()),
                MediumQuery(TENANT, Digests(Modality.IMAGE, bytes(32)), RequestedSettings()),
            ]
        )
    assert [one is not None for one in found] == [True, False, False, False]
    assert found[0] is not None
    assert found[0].manifest == stored.feature.manifest
