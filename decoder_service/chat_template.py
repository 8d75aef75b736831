"""Renders turns with the checkpoint's chat template, so that callers' texts can't forge its marks.

The first character of each special token in the callers' texts is hidden behind a character that occurs
nowhere else. The template sees the texts otherwise as they are (it may trim or cut them), and what it
writes is split at its special tokens, all of which are now its own.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from decoder_service.turns import FeaturePart, TextPart, Turn
from shared.errors import InvalidRequest
from shared.features.key import Modality

# For checkpoints without a template: the form that all Qwen3-VL checkpoints were trained on.
DEFAULT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
        {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
        {%- else -%}{{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' -}}
"""

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


def find_template(checkpoint: Path, tokenizer_template: str | None) -> str:
    """The template that Transformers' processor would take, or the default where there is none."""
    jinja, legacy = checkpoint / "chat_template.jinja", checkpoint / "chat_template.json"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    if legacy.is_file():
        return str(json.loads(legacy.read_text(encoding="utf-8"))["chat_template"])
    return tokenizer_template or DEFAULT_TEMPLATE


class ChatTemplate:
    """A chat template and the special tokens that structure its text.

    `variables` are further names that the template may use (Transformers passes bos_token and its kin).
    """

    def __init__(
        self, source: str, special_tokens: Collection[str], variables: Mapping[str, str] | None = None
    ) -> None:
        self._source = source
        self._variables = dict(variables or {})
        alternatives = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._split = re.compile(f"({alternatives})")
        self._starts = re.compile(f"(?={alternatives})")
        self._first_characters = sorted({token[0] for token in special_tokens})

    def render(self, turns: Sequence[Turn], modalities: Mapping[str, Modality]) -> list[str]:
        """The prompt in pieces: text, special token, text, ..., text. `modalities` are by feature key.

        Raises:
            InvalidRequest: the template refuses the turns.
        """
        disguise = _disguise(self._first_characters, turns, self._source)
        messages = [self._message(turn, modalities, disguise) for turn in turns]
        try:
            [text], _ = render_jinja_template(
                conversations=[messages],
                chat_template=self._source,
                add_generation_prompt=True,
                **self._variables,
            )
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these turns: {error}", field="task.turns"
            ) from error
        reveal = str.maketrans({hidden: character for character, hidden in disguise.items()})
        return [piece.translate(reveal) for piece in self._split.split(text)]

    def _message(
        self, turn: Turn, modalities: Mapping[str, Modality], disguise: Mapping[str, str]
    ) -> dict[str, Any]:
        texts = self._hide_special_tokens(turn, disguise)
        content = [
            {"type": modalities[part.key].name.lower()}
            if isinstance(part, FeaturePart)
            else {"type": "text", "text": next(texts)}
            for part in turn.parts
        ]
        return {"role": turn.role, "content": content}

    def _hide_special_tokens(self, turn: Turn, disguise: Mapping[str, str]) -> Iterator[str]:
        """The texts of a turn, none of which holds a special token, nor do any two side by side."""
        between = next(iter(disguise.values()))
        texts = [part.text if isinstance(part, TextPart) else between for part in turn.parts]
        characters = list("".join(texts))
        for match in self._starts.finditer("".join(texts)):
            characters[match.start()] = disguise[characters[match.start()]]
        rest = iter(characters)
        for part, text in zip(turn.parts, texts, strict=True):
            hidden = "".join(itertools.islice(rest, len(text)))
            if isinstance(part, TextPart):
                yield hidden


def _disguise(characters: Sequence[str], turns: Sequence[Turn], template: str) -> dict[str, str]:
    """A stand-in for each character, none of which any text or the template holds."""
    taken = set(template)
    for turn in turns:
        for part in turn.parts:
            taken |= set(part.text) if isinstance(part, TextPart) else set()
    free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in taken)
    disguise = dict(zip(characters, free, strict=False))
    if len(disguise) < len(characters):
        raise InvalidRequest("the text uses every private character of Unicode", field="task.turns")
    return disguise
