"""Owns how examples become tensors for a training step; knows nothing of losses or schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration

from demo.chat import clip_part, conversation, image_part
from demo.fast import FastTower, Sight
from demo.model import TOKEN_PIXELS
from demo.pictures import COLOURS, DIGITS, SHAPES, Picture, draw
from demo.pixels import Pixels, fit, patchify, served_size
from demo.questions import Example

WHATS = ("nothing", *SHAPES, *DIGITS)
HUES = ("nothing", *COLOURS)
IGNORED = -100


@dataclass(slots=True)
class Group:
    """All views of one size: frames `[n, 1 or 2, h, w, 3]` (one for a still picture), their place
    in reading order, and under each merged patch the true thing and colour (`IGNORED` for clips)
    and `places` `[n, tokens, 2]`: the centre of that thing, or of the patch where there is none,
    from -1 (left, top) to 1 (right, bottom)."""

    frames: torch.Tensor
    order: list[int]
    whats: torch.Tensor
    hues: torch.Tensor
    places: torch.Tensor


@dataclass(slots=True)
class Batch:
    kinds: list[str]
    ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class Labels:
    """What is to be seen under each merged patch of one view, in reading order."""

    whats: list[int]
    hues: list[int]
    places: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _View:
    """One passage through the tower: a still picture, or two frames of a clip."""

    frames: Pixels
    labels: Labels

    @property
    def token_count(self) -> int:
        return len(self.labels.whats)


def _still(picture: Picture) -> _View:
    return _View(np.asarray(fit(draw(picture)))[None], dense_labels(picture))


def _clip(frames: Sequence[Picture]) -> list[_View]:
    pixels = [np.asarray(fit(draw(frame))) for frame in frames]
    if len(pixels) % 2:
        pixels.append(pixels[-1])
    height, width, _ = pixels[0].shape
    count = (height // TOKEN_PIXELS) * (width // TOKEN_PIXELS)
    ignored = Labels([IGNORED] * count, [IGNORED] * count, [(0.0, 0.0)] * count)
    pairs = zip(pixels[::2], pixels[1::2], strict=True)
    return [_View(np.stack(pair), ignored) for pair in pairs]


def dense_labels(picture: Picture) -> Labels:
    """A mark is seen in the patch that holds its centre and in those whose centre it covers."""
    width, height = served_size((picture.width, picture.height))
    columns, rows = width // TOKEN_PIXELS, height // TOKEN_PIXELS
    labels = Labels(
        [0] * (rows * columns),
        [0] * (rows * columns),
        [
            ((x + 0.5) * 2 / columns - 1, (y + 0.5) * 2 / rows - 1)
            for y in range(rows)
            for x in range(columns)
        ],
    )
    for mark in picture.marks:
        u, v = mark.x / picture.width, mark.y / picture.height
        radius = 0.8 * mark.radius * min(width / picture.width, height / picture.height)
        home = int(v * rows) * columns + int(u * columns)
        for index in range(rows * columns):
            row, column = divmod(index, columns)
            away = math.hypot(
                (column + 0.5) * TOKEN_PIXELS - u * width, (row + 0.5) * TOKEN_PIXELS - v * height
            )
            covered = away <= radius and not mark.what.isdigit()
            if index == home or (covered and not labels.whats[index]):
                labels.whats[index] = WHATS.index(mark.what)
                labels.hues[index] = HUES.index(mark.colour)
                labels.places[index] = (2 * u - 1, 2 * v - 1)
    return labels


class Collator:
    """Turns examples into a batch for one model and one tokenizer."""

    def __init__(self, core: Tokenizer, model: Qwen3VLForConditionalGeneration) -> None:
        self._core = core
        self._model = model
        self._start = core.token_to_id("<|im_start|>")
        self._end = core.token_to_id("<|im_end|>")
        self._assistant = core.encode("assistant\n").ids
        self._pad = core.token_to_id("<|endoftext|>")

    def __call__(self, examples: Sequence[Example]) -> Batch:
        views: list[_View] = []
        rows: list[list[int]] = []
        stills: list[_View] = []
        clips: list[list[_View]] = []
        for example in examples:
            media, seen = self._media(example, stills, clips)
            views += seen
            rows.append(self._core.encode(conversation(example.turns, media, example.system)).ids)
        ids, lengths = self._padded(rows)
        positions = self._positions(ids, lengths, stills, clips)
        labels = torch.stack([self._labels(row) for row in ids])
        kinds = [example.kind for example in examples]
        return Batch(kinds, ids, labels, lengths, positions, _grouped(views))

    def _media(
        self, example: Example, stills: list[_View], clips: list[list[_View]]
    ) -> tuple[str, list[_View]]:
        if example.clip:
            seen = _clip(example.clip)
            clips.append(seen)
            part = clip_part(len(example.clip), example.fps, seen[0].token_count)
            return part, seen
        seen = [_still(picture) for picture in example.pictures]
        stills += seen
        return "".join(image_part(view.token_count) for view in seen), seen

    def _padded(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows])
        return ids, torch.tensor([len(row) for row in rows])

    def _positions(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        stills: list[_View],
        clips: list[list[_View]],
    ) -> torch.Tensor:
        config = self._model.config
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        still_grids = [_grid(1, view) for view in stills]
        clip_grids = [_grid(len(views), views[0]) for views in clips]
        positions, _ = self._model.model.get_rope_index(
            ids,
            kinds,
            image_grid_thw=torch.tensor(still_grids) if still_grids else None,
            video_grid_thw=torch.tensor(clip_grids) if clip_grids else None,
            attention_mask=mask.int(),
        )
        result: torch.Tensor = positions
        return result

    def _labels(self, row: torch.Tensor) -> torch.Tensor:
        """At each place the token that must come next, inside the assistant's turns only."""
        ids = row.tolist()
        labels = [IGNORED] * len(ids)
        head = [self._start, *self._assistant]
        for index in range(len(ids)):
            if ids[index : index + len(head)] == head:
                first = index + len(head)
                end = ids.index(self._end, first)
                labels[first - 1 : end] = ids[first : end + 1]
        return torch.tensor(labels)


def _grid(depth: int, view: _View) -> list[int]:
    _, height, width, _ = view.frames.shape
    return [depth, height // 16, width // 16]


def _grouped(views: list[_View]) -> list[Group]:
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, view in enumerate(views):
        by_shape.setdefault(view.frames.shape, []).append(index)
    return [
        Group(
            torch.from_numpy(np.stack([views[index].frames for index in order])),
            order,
            torch.tensor([views[index].labels.whats for index in order]),
            torch.tensor([views[index].labels.hues for index in order]),
            torch.tensor([views[index].labels.places for index in order]),
        )
        for order in by_shape.values()
    ]


def look_at(tower: FastTower, groups: list[Group], *, levels: bool = True) -> list[Sight]:
    """What the tower sees of each group."""
    sights = []
    for group in groups:
        _, _, height, width, _ = group.frames.shape
        sights.append(tower.look(patchify(group.frames), height, width, levels=levels))
    return sights


def in_reading_order(groups: list[Group], sights: list[Sight]) -> Sight | None:
    """All visual tokens of a batch as one row, in the order of their places in the text."""
    if not groups:
        return None
    level_count = len(sights[0].levels)
    rows: dict[int, list[torch.Tensor]] = {}
    for group, sight in zip(groups, sights, strict=True):
        for place, index in enumerate(group.order):
            rows[index] = [sight.main[place], *(level[place] for level in sight.levels)]
    columns = [
        torch.cat([rows[index][column] for index in sorted(rows)]) for column in range(level_count + 1)
    ]
    return Sight(columns[0], columns[1:])


def labels_in_reading_order(groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """What and which colour is under each visual token of a batch, in the order of the text."""
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for group in groups:
        for place, index in enumerate(group.order):
            rows[index] = group.whats[place], group.hues[place]
    whats = torch.cat([rows[index][0] for index in sorted(rows)])
    hues = torch.cat([rows[index][1] for index in sorted(rows)])
    return whats, hues
