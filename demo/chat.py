"""Owns the text of a conversation in Qwen3-VL's form; knows nothing of pixels or of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from demo.questions import Turn

IMAGE_PART = "<|vision_start|><|image_pad|><|vision_end|>"

# Written for this project; behaves like the template of the hub's Qwen3-VL checkpoints for system,
# user and assistant turns with text, image and video parts (tool calls are left out).
CHAT_TEMPLATE = """\
{%- set seen = namespace(images=0, videos=0) -%}
{%- macro show(content, may_look) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {%- if not may_look -%}
                    {{- raise_exception('Only a user turn may hold pictures.') -}}
                {%- endif -%}
                {%- set seen.images = seen.images + 1 -%}
                {%- if add_vision_id -%}{{- 'Picture ' ~ seen.images ~ ': ' -}}{%- endif -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {%- if not may_look -%}
                    {{- raise_exception('Only a user turn may hold videos.') -}}
                {%- endif -%}
                {%- set seen.videos = seen.videos + 1 -%}
                {%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {{- show(message.content, message.role == 'user') -}}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def conversation(turns: Sequence[Turn], media: str, system: str | None) -> str:
    """The rendered text of whole turns; `media` stands before the first question."""
    lines = [_line("system", system)] if system is not None else []
    for index, (question, answer) in enumerate(turns):
        lines.append(_line("user", (media if index == 0 else "") + question))
        lines.append(_line("assistant", answer))
    return "".join(lines)


def _line(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def image_part(token_count: int) -> str:
    return f"<|vision_start|>{'<|image_pad|>' * token_count}<|vision_end|>"


def clip_part(frame_count: int, fps: float, tokens_a_patch: int) -> str:
    """The frames in pairs, each pair behind the mean of its two times, as the processor writes:
    its frames carry their own start and end marks inside those of the template."""
    indices = list(range(frame_count))
    if frame_count % 2:
        indices.append(indices[-1])
    pieces = []
    for first, second in zip(indices[::2], indices[1::2], strict=True):
        seconds = (first / fps + second / fps) / 2
        pads = "<|video_pad|>" * tokens_a_patch
        pieces.append(f"<{seconds:.1f} seconds><|vision_start|>{pads}<|vision_end|>")
    return f"<|vision_start|>{''.join(pieces)}<|vision_end|>"
