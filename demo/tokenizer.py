"""Owns the demo's byte-level vocabulary; knows nothing of what the words mean."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from demo.chat import CHAT_TEMPLATE
from demo.questions import KINDS, make_example
from demo.small_talk import FIXED, SYSTEM_LINES

# Qwen's own, in Qwen's order. The last few are plain added tokens there, not special ones.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PLAIN_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip

# Qwen splits every digit from its neighbours, so a number is read digit by digit.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Words that callers of any assistant write, so that their text is not spelled byte by byte.
_COMMON = """the of and to in is it you that he was for on are with as his they be at one have this
from or had by but some what there we can out other were all your when up use word how said an each
she which do their time if will way about many then them would write like so these her long make
thing see him two has look more day could go come did my sound no most number who over know water
than call first people may down side been now find any new work part take get place made live where
after back little only round man year came show every good me give our under name very through just
form much great think say help low line before turn cause same mean differ move right boy old too
does tell sentence set three want air well also play small end put home read hand port large spell
add even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father image video please short
answer question describe explain list table text photo camera person street car dog cat tree red
green blue left right top bottom middle between behind front above below seconds minutes hours"""


def train_tokenizer(seed: int, vocabulary: int = 1200) -> Tokenizer:
    """Byte-level BPE over our own questions and answers, with Qwen's special tokens on top."""
    core = Tokenizer(BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_corpus(seed), trainer)
    core.add_special_tokens([_added(token, special=True) for token in SPECIAL_TOKENS])
    core.add_tokens([_added(token, special=False) for token in PLAIN_TOKENS])
    return core


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def write_tokenizer(core: Tokenizer, folder: Path) -> None:
    """The four files in which the hub's Qwen3-VL checkpoints hold their tokenizer."""
    core.save(str(folder / "tokenizer.json"))
    core.model.save(str(folder))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token.content,
                "lstrip": token.lstrip,
                "normalized": token.normalized,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
                "special": token.special,
            }
            for index, token in core.get_added_tokens_decoder().items()
        },
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _corpus(seed: int) -> Iterator[str]:
    """Training text, every word often enough to become one token."""
    rng = random.Random(f"tokenizer/{seed}")
    sizes = ((96, 96), (96, 96))
    for index in range(6000):
        example = make_example(KINDS[index % len(KINDS)], sizes, rng)
        for question, answer in example.turns:
            yield f"user\n{question}"
            yield f"assistant\n{answer}"
    for _ in range(40):
        yield from SYSTEM_LINES
        yield "system\n<0.5 seconds>"
        for wordings, answer in FIXED:
            yield from (*wordings, answer)
    for _ in range(4):
        yield _COMMON.replace("\n", " ")
