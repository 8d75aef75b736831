"""What identifies a feature: golden digests, and pairs that must never share one."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shared.errors import MalformedFeatureKey
from shared.features.key import (
    EffectiveSettings,
    FeatureKey,
    Modality,
    frames_digest,
    media_digest,
    namespace,
    tenant_tag,
)

SETTINGS = EffectiveSettings(do_resize=True, min_pixels=65_536, max_pixels=1_048_576)
CLIP_SETTINGS = replace(SETTINGS, total_pixels=3_000_000, fps=2.0)
PICTURE = sha256(b"picture").digest()
OTHER_PICTURE = sha256(b"another picture").digest()

# Changing any of these empties every store that is in use: only together with LAYOUT_VERSION.
GOLDEN = {
    "tenant, none": "1ec343be8199cc75952d79289a844cedb961e755aa6d16b5c5ba47efc5338044",
    "tenant, named": "6e75e0e483e9c2dc57473f88915681909f9ae9350825c54d09d7f4fb122b60a8",
    "namespace": "bbfa6f2f0d50cd7eb6eedf99f1a550b9d7845640ec95ce0f72d34cf8bc5aafa9",
    "picture": "8fd24424ecd347228e2b1242cd4013da58b89b67e3bfe843d085a53197ea5e57",
    "clip": "70d4cd37be991eb144d8cdeefab3f9643aac824848da936611a553b4470b9464",
    "frames": "a107ccb2c1374870cf79686ce7f3d61f298a875742e8429c7608fa9825ba50c9",
}


def golden() -> dict[str, str]:
    small_clip = EffectiveSettings(do_resize=True, min_pixels=1, max_pixels=2, total_pixels=3, fps=2.0)
    as_they_are = EffectiveSettings(do_resize=False, num_frames=2)
    return {
        "tenant, none": tenant_tag(""),
        "tenant, named": tenant_tag("shop"),
        "namespace": namespace([("checkpoint", "f" * 64), ("dtype", "bfloat16")]),
        "picture": media_digest(Modality.IMAGE, PICTURE, SETTINGS),
        "clip": media_digest(Modality.VIDEO, PICTURE, small_clip),
        "frames": frames_digest([PICTURE, PICTURE], [0.0, 0.5], as_they_are),
    }


def test_digests_are_what_they_have_always_been() -> None:
    assert golden() == GOLDEN


def test_c06_keys_do_not_depend_on_the_process() -> None:
    program = "from tests.unit.shared.test_key import golden; print(sorted(golden().items()))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert answers == {str(sorted(GOLDEN.items()))}


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def digest_of(data: bytes) -> str:
    return media_digest(Modality.IMAGE, sha256(data).digest(), SETTINGS)


def test_c01_equal_pixel_bytes_of_another_shape_are_another_picture() -> None:
    pixels = bytes(range(72))
    wide, tall = Image.frombytes("RGB", (6, 4), pixels), Image.frombytes("RGB", (4, 6), pixels)
    assert wide.tobytes() == tall.tobytes()
    assert digest_of(png(wide)) != digest_of(png(tall))


def test_c02_equal_indices_into_another_palette_are_another_picture() -> None:
    pictures = []
    for colour in ((255, 0, 0), (0, 0, 255)):
        picture = Image.new("P", (64, 64), 0)
        picture.putpalette(colour)
        pictures.append(picture)
    assert pictures[0].tobytes() == pictures[1].tobytes()
    assert digest_of(png(pictures[0])) != digest_of(png(pictures[1]))


def test_c05_keys_hold_whole_digests() -> None:
    key = FeatureKey(tenant_tag(""), namespace([]), digest_of(b""))
    assert [len(part) for part in str(key).split(".")] == [64, 64, 64]
    assert FeatureKey.parse(str(key)) == key
    digest = key.digest
    for alike in ("0" * 60 + digest[-4:], digest[:16] + "0" * 48):
        assert FeatureKey.parse(str(replace(key, digest=alike))) != key


def test_c07_each_item_of_a_list_has_a_key_of_its_own() -> None:
    assert digest_of(b"A") == digest_of(b"A")
    assert digest_of(b"A") != digest_of(b"B")


def test_c07_another_cut_into_frames_is_another_clip() -> None:
    def digest(*frames: bytes) -> str:
        times = [0.5 * index for index in range(len(frames))]
        return frames_digest([sha256(frame).digest() for frame in frames], times, CLIP_SETTINGS)

    assert digest(b"12", b"345") != digest(b"123", b"45")
    assert digest(b"1", b"2") != digest(b"2", b"1")
    assert digest(b"1", b"2") != digest(b"1", b"2", b"2")
    assert digest(b"12345") != digest(b"12", b"345")


def test_frames_of_other_times_are_another_clip() -> None:
    digests = {
        frames_digest([PICTURE, OTHER_PICTURE], times, CLIP_SETTINGS)
        for times in ([0.0, 0.5], [0.0, 1.0], [0.5, 0.0])
    }
    assert len(digests) == 3


def test_a_list_of_frames_needs_as_many_times() -> None:
    with pytest.raises(ValueError, match="shorter"):
        frames_digest([PICTURE, PICTURE], [0.0], CLIP_SETTINGS)


@pytest.mark.parametrize(
    "other",
    [
        replace(CLIP_SETTINGS, max_pixels=200_000),
        replace(CLIP_SETTINGS, min_pixels=1),
        replace(CLIP_SETTINGS, total_pixels=1),
        replace(CLIP_SETTINGS, fps=1.0),
        replace(CLIP_SETTINGS, fps=None),
        replace(CLIP_SETTINGS, fps=None, num_frames=2),
        replace(CLIP_SETTINGS, do_resize=False),
    ],
)
def test_c08_another_effective_setting_is_another_key(other: EffectiveSettings) -> None:
    assert media_digest(Modality.VIDEO, PICTURE, other) != media_digest(
        Modality.VIDEO, PICTURE, CLIP_SETTINGS
    )


def test_c08_equal_effective_settings_are_the_same_key() -> None:
    assert media_digest(Modality.IMAGE, PICTURE, replace(SETTINGS)) == media_digest(
        Modality.IMAGE, PICTURE, SETTINGS
    )


def test_a_value_does_not_move_from_one_setting_to_the_next() -> None:
    first = EffectiveSettings(do_resize=True, min_pixels=5)
    second = EffectiveSettings(do_resize=True, max_pixels=5)
    assert media_digest(Modality.IMAGE, PICTURE, first) != media_digest(Modality.IMAGE, PICTURE, second)


def test_a_picture_is_no_clip() -> None:
    assert media_digest(Modality.IMAGE, PICTURE, SETTINGS) != media_digest(Modality.VIDEO, PICTURE, SETTINGS)


Fields = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=4)


@settings(deadline=None)
@given(Fields, Fields)
def test_namespaces_agree_only_on_the_same_fields(
    left: list[tuple[str, str]], right: list[tuple[str, str]]
) -> None:
    assert (namespace(left) == namespace(right)) == (sorted(left) == sorted(right))


def test_names_and_values_do_not_run_into_one_another() -> None:
    assert namespace([("ab", "c")]) != namespace([("a", "bc")])
    assert namespace([("a", "b"), ("c", "d")]) != namespace([("a", "bcd")])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 64,
        ".".join(["a" * 64] * 2),
        ".".join(["a" * 64] * 4),
        ".".join(["a" * 64, "a" * 64, "a" * 63]),
        ".".join(["a" * 64, "a" * 64, "A" * 64]),
        ".".join(["a" * 64, "a" * 64, "g" * 64]),
        ".".join(["a" * 64] * 3) + "\n",
        "\r\n" + ".".join(["a" * 64] * 3),
        ".".join(["a" * 64, "a" * 64, "\u0661" * 64]),
        "{x}" + ".".join(["a" * 64] * 3),
        "a" * 1_000_000,
    ],
    ids=range(12),
)
def test_c12_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(MalformedFeatureKey) as caught:
        FeatureKey.parse(text, field="task.turns.parts.feature_key")
    assert caught.value.field == "task.turns.parts.feature_key"
    assert len(caught.value.message) < 200
