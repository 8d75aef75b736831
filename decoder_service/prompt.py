"""Turns of text and features to the token ids and positions of a prompt; knows no tensors.

The result is token for token what Transformers' processor makes of the same turns, but for special tokens
that a caller typed, which are plain text here. Each stretch of text between two special tokens of the chat
template is encoded whole, across the seams of template and caller, and no special token is looked for in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from decoder_service.chat_template import ChatTemplate, find_template
from decoder_service.detokenize import Detokenizer, Vocabulary
from decoder_service.engine.engine import Prompt
from decoder_service.turns import FeaturePart, Part, TextPart, Turn, check_turns
from shared.checkpoint import Checkpoint
from shared.errors import FeatureRevisionMismatch, InvalidRequest
from shared.features.key import Modality
from shared.features.manifest import Manifest
from shared.weights import read_json

__all__ = ["FeaturePart", "Part", "PromptBuilder", "TextPart", "Turn"]

_PADS = {"<|image_pad|>": Modality.IMAGE, "<|video_pad|>": Modality.VIDEO}


class PromptBuilder:
    """Builds the prompts of one checkpoint; may be used from several threads.

    `merge_size` is the side of the square of patches that make one visual token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        special_token_ids: Mapping[str, int],
        *,
        merge_size: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._template = template
        self._special_token_ids = dict(special_token_ids)
        self._vocabulary = Vocabulary(tokenizer.get_vocab(), frozenset(special_token_ids.values()))
        self._merge_size = merge_size
        self.stop_token_ids = stop_token_ids

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> Self:
        """The builder of a checkpoint; one without a chat template gets Qwen3-VL's usual form."""
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
        special_token_ids = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        source = find_template(checkpoint.path, tokenizer.chat_template)
        return cls(
            tokenizer.backend_tokenizer,
            ChatTemplate(source, special_token_ids, tokenizer.special_tokens_map),
            special_token_ids,
            merge_size=_merge_size(checkpoint.path),
            stop_token_ids=checkpoint.stop_token_ids(),
        )

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the tokenizers library writes it."""
        return str(self._tokenizer.to_str())

    def build(
        self, turns: Sequence[Turn], manifests: Mapping[str, Manifest], *, field: str = "task.turns"
    ) -> Prompt:
        """The prompt of a conversation. `manifests` has those of all features, by the text of their keys.

        `field` is what errors call the turns.

        Raises:
            InvalidRequest: the turns are no conversation, or the template has no place for a feature.
            FeatureRevisionMismatch: a feature's token count is not what its grid says.
        """
        check_turns(turns, field=field)
        pieces = self._template.render(turns, {key: each.modality for key, each in manifests.items()})
        features = [
            manifests[part.key] for turn in turns for part in turn.parts if isinstance(part, FeaturePart)
        ]
        _check_places([_PADS[piece] for piece in pieces[1::2] if piece in _PADS], features)
        draft = _Draft(self._tokenizer, self._special_token_ids, self._merge_size)
        waiting = iter(features)
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                draft.add_text(piece)
            elif piece in _PADS:
                draft.add_feature(next(waiting), piece)
            else:
                draft.add_special(piece)
        return draft.finish()

    def detokenizer(self, stop_sequences: Sequence[str] = ()) -> Detokenizer:
        """A detokenizer for one answer."""
        return Detokenizer(self._vocabulary, stop_sequences)


class _Draft:
    """A prompt as it grows. Text waits until its stretch is complete, up to the next special token."""

    def __init__(self, tokenizer: Tokenizer, special_token_ids: Mapping[str, int], merge_size: int) -> None:
        self._tokenizer = tokenizer
        self._special_token_ids = special_token_ids
        self._merge_size = merge_size
        self._stretch: list[str] = []
        self._token_ids: list[int] = []
        self._positions: list[tuple[int, int, int]] = []
        self._next_position = 0
        self._visual_spans: list[tuple[tuple[int, int], ...]] = []

    def add_text(self, text: str) -> None:
        self._stretch.append(text)

    def add_special(self, token: str) -> None:
        self._close_stretch()
        self._add_tokens([self._special_token_ids[token]])

    def add_feature(self, feature: Manifest, pad: str) -> None:
        """A picture is its tokens; a clip is, for each temporal patch, its time and a picture."""
        patches = 1 if feature.modality is Modality.IMAGE else len(feature.timestamps)
        grid = feature.grid
        if grid.t != patches or feature.token_count != grid.token_count(self._merge_size):
            raise FeatureRevisionMismatch("a feature's tokens or times do not match its grid")
        if feature.modality is Modality.IMAGE:
            self._close_stretch()
            self._visual_spans.append((self._add_patch(feature, pad),))
        else:
            self._visual_spans.append(tuple(self._add_clip(feature, pad)))

    def finish(self) -> Prompt:
        self._close_stretch()
        return Prompt(
            token_ids=tuple(self._token_ids),
            positions=tuple(self._positions),
            next_position=self._next_position,
            visual_spans=tuple(self._visual_spans),
        )

    def _add_clip(self, clip: Manifest, pad: str) -> Iterator[tuple[int, int]]:
        """As the processor writes it: in the place of the pad token, between the template's marks."""
        for seconds in clip.timestamps:
            self.add_text(f"<{seconds:.1f} seconds>")
            self.add_special("<|vision_start|>")
            yield self._add_patch(clip, pad)
            self.add_special("<|vision_end|>")

    def _add_patch(self, feature: Manifest, pad: str) -> tuple[int, int]:
        """One temporal patch: a rectangle in height and width at one time; gives its (start, count)."""
        first = self._next_position
        rows, columns = feature.grid.h // self._merge_size, feature.grid.w // self._merge_size
        start = len(self._token_ids)
        self._token_ids += [self._special_token_ids[pad]] * (rows * columns)
        self._positions += [
            (first, first + row, first + column) for row in range(rows) for column in range(columns)
        ]
        self._next_position += max(rows, columns)
        return start, rows * columns

    def _close_stretch(self) -> None:
        stretch = "".join(self._stretch)
        self._stretch.clear()
        if stretch:
            self._add_tokens(self._tokenizer.encode(stretch, add_special_tokens=False).ids)

    def _add_tokens(self, token_ids: Sequence[int]) -> None:
        first = self._next_position
        self._token_ids += token_ids
        self._positions += [(place, place, place) for place in range(first, first + len(token_ids))]
        self._next_position += len(token_ids)


def _check_places(places: Sequence[Modality], features: Sequence[Manifest]) -> None:
    if len(places) != len(features):
        raise InvalidRequest(
            f"the model's chat template made {len(places)} placeholders, {len(features)} items",
            field="task.turns",
        )
    if places != [feature.modality for feature in features]:
        raise InvalidRequest("the model's chat template reorders pictures and clips", field="task.turns")


def _merge_size(checkpoint: Path) -> int:
    return int(read_json(checkpoint / "config.json")["vision_config"].get("spatial_merge_size", 2))
