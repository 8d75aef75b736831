"""Clips through the running pair: looked at once, answered rightly, in any order with pictures."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from demo.pair import Pair
from lenspair_client import Clip, Generation, InvalidArgument, LenspairClient, MediaSettings, Outcome
from tests.clips import as_file, as_frames, counted_frames, demo_clip, png, video

EXAMPLES = [(kind, index) for kind in ("motion", "order") for index in range(6)]
WHOLE = MediaSettings(num_frames=64)


@pytest.fixture
def client(pair: Pair) -> Iterator[LenspairClient]:
    with LenspairClient(pair.encoder.address, pair.decoder.address) as connected:
        yield connected


def circle(colour: str) -> bytes:
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((24, 24, 72, 72), fill=colour)
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def test_clips_are_answered_rightly_as_frames_and_as_files(client: LenspairClient) -> None:
    right = {"frames": 0, "file": 0}
    for kind, index in EXAMPLES:
        conversation = demo_clip(kind, index)
        question, truth = conversation.turns[-1]
        for name, clip, settings in (
            ("frames", as_frames(conversation), None),
            ("file", as_file(conversation), WHOLE),
        ):
            answer = client.ask(question, [clip], settings=settings)
            right[name] += answer.text == truth
    assert min(right.values()) >= len(EXAMPLES) - 1, right


def test_a_clip_is_looked_at_once(client: LenspairClient) -> None:
    clip = as_frames(demo_clip("motion", 20))
    [first] = client.ensure([clip])
    [again] = client.ensure([clip])
    assert (first.outcome, again.outcome) == (Outcome.ENCODED, Outcome.HIT)
    assert first.key == again.key
    assert first.grid[0] == (len(clip.frames) + 1) // 2


# C07, C08
def test_frames_times_and_settings_decide_the_key(client: LenspairClient) -> None:
    frames = tuple(map(png, counted_frames(6)))
    file = video(counted_frames(6))
    clips = [
        (Clip(frames=frames, timestamps=tuple(map(float, range(6)))), None),
        (Clip(frames=frames, timestamps=tuple(n / 2 for n in range(6))), None),
        (Clip(frames=frames[::-1], timestamps=tuple(map(float, range(6)))), None),
        (Clip(frames=frames[:5], timestamps=tuple(map(float, range(5)))), None),
        (Clip(file=file), MediaSettings(fps=1)),
        (Clip(file=file), MediaSettings(fps=2)),
        (Clip(file=file), MediaSettings(num_frames=4)),
    ]
    keys = [client.ensure([clip], settings=settings)[0].key for clip, settings in clips]
    assert len(set(keys)) == len(clips)


# I38
def test_clips_and_pictures_are_bound_in_their_order(client: LenspairClient) -> None:
    clip = as_frames(demo_clip("order", 3))
    asked = Generation(return_token_ids=True, top_logprobs=0, max_output_tokens=4)

    def fingerprint(*media: bytes | Clip) -> tuple[float, ...]:
        answer = client.ask("What colour is the circle?", media, generation=asked)
        return tuple(round(place.chosen.logprob, 3) for place in answer.logprobs)

    orders: list[tuple[bytes | Clip, ...]] = [
        (clip, circle("red")),
        (circle("red"), clip),
        (circle("red"), clip, circle("green")),
        (circle("green"), clip, circle("red")),
    ]
    first = [fingerprint(*media) for media in orders]
    assert len(set(first)) == len(orders)
    assert [fingerprint(*media) for media in orders] == first


@pytest.mark.parametrize(
    "media",
    [
        pytest.param(Clip(file=b"no clip at all"), id="no clip"),
        pytest.param(Clip(file=circle("red")), id="a picture"),
        pytest.param(Clip(file=video(counted_frames(9))[:400]), id="a beginning"),
        pytest.param(Clip(frames=(circle("red"), b"x"), timestamps=(0.0, 1.0)), id="a bad frame"),
        pytest.param(Clip(frames=(circle("red"),) * 2, timestamps=(1.0, 1.0)), id="no time passes"),
    ],
)
def test_what_is_no_clip_is_refused_and_harms_nobody(client: LenspairClient, media: Clip) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.ensure([media])
    assert caught.value.field.startswith(("media", "queries[0].frames"))
    assert client.ask("What colour is the circle?", [circle("blue")]).text == "blue"


def test_the_command_takes_clips_beside_pictures(pair: Pair, tmp_path: Path) -> None:
    picture, file = tmp_path / "picture.png", tmp_path / "clip.mp4"
    picture.write_bytes(circle("red"))
    file.write_bytes(video(counted_frames(6), fps=3))

    def lenspair(*arguments: object) -> Any:
        servers = ["--encoder", pair.encoder.address, "--decoder", pair.decoder.address]
        command = [sys.executable, "-m", "lenspair_client", *map(str, arguments), *servers, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    answer = lenspair("ask", "--image", picture, "--clip", file, "What do you see?")
    assert [each["file"] for each in answer["images"]] == [str(picture), str(file)]
    assert lenspair("encode", "--clip", file)["outcome"] == "hit"
