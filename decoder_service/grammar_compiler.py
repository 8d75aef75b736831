"""Forms of answers compiled for the tokens of one checkpoint, within limits; knows no answers."""

import json
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits

from decoder_service.output_format import OutputFormat
from shared.errors import InvalidRequest

# The compiler calls itself as deeply as a form is nested, references included, and the system ends a process
# whose stack is used up. The check (grammar_check.py) runs with the small stack, everything else with the
# large one: what the check has survived goes through with room to spare. Both are only reserved.
CHECK_STACK_BYTES = 8 << 20
STACK_BYTES = 8 * CHECK_STACK_BYTES

# Of one to two kilobytes each.
_MAX_LEXER_STATES = 20_000
_MOST_REASON = 200


class GrammarCompiler:
    """`tokenizer_json` is the tokenizer as the tokenizers library writes it, `vocab_size` the model's.

    Ids that name no token are never allowed, nor are special ones, but for those of `end_ids`, which are
    allowed where an answer is complete.
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self._tokenizer_json = tokenizer_json
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(end_ids))

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> "GrammarCompiler":
        """The one that `pack` was called on."""
        said = json.loads(packed)
        return cls(said["tokenizer"], vocab_size=said["vocab_size"], end_ids=said["end_ids"])

    def pack(self) -> bytes:
        return json.dumps(
            {
                "tokenizer": self._tokenizer_json,
                "vocab_size": self.vocab_size,
                "end_ids": sorted(self.end_ids),
            }
        ).encode()

    def compile(self, form: OutputFormat) -> LLMatcher:
        """Raises InvalidRequest: no grammar can be made of the form."""
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, form.grammar(), log_level=0, limits=limits)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0][:_MOST_REASON]
            raise InvalidRequest(f"no grammar can be made of it: {reason}", field=form.field)
        return matcher


def threads_with_stack(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads that have STACK_BYTES each."""
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    started = threading.Barrier(num_threads + 1)
    with_stack(STACK_BYTES, lambda: [threads.submit(started.wait) for _ in range(num_threads)])
    started.wait()
    return threads


def with_stack(stack_bytes: int, start: Callable[[], object]) -> None:
    """Threads that `start` starts have that much stack."""
    before = threading.stack_size(stack_bytes)
    try:
        start()
    finally:
        threading.stack_size(before)
