"""Forms of answers as sets of tokens that may come next, computed beside the model; knows no requests.

A form is compiled once for as long as it is remembered; each answer goes through a copy of its own. The set
for the next token is computed from the moment on that the last one is known, on threads of its own, while
the model runs the step that it is for.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from decoder_service.output_format import OutputFormat
from shared.errors import InvalidRequest

MAX_REMEMBERED = 64
MASK_THREADS = 2
_MOST_REASON = 200


class Grammars:
    """Compiles forms for the tokens of one checkpoint. Close it in the end.

    `tokenizer_json` is the tokenizer as the tokenizers library writes it, `vocab_size` the model's: ids that
    name no token are never allowed, nor are special ones, but for those of `end_ids`, which are allowed where
    an answer is complete.
    """

    def __init__(self, tokenizer_json: str, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(end_ids))
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[OutputFormat, LLMatcher] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._masks = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="grammar-masks")

    async def begin(self, form: OutputFormat, continuation: Sequence[int]) -> "AnswerGrammar":
        """The grammar of one answer, behind the tokens that it has already.

        Raises:
            InvalidRequest: nothing can be made of the form, or the continuation does not have it.
        """
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._compiler, self._matcher, form)
        if matcher.try_consume_tokens(list(continuation)) < len(continuation):
            raise InvalidRequest(
                "the tokens do not have the form of task.output_format", field="task.continuation_token_ids"
            )
        return AnswerGrammar(matcher, self._masks, self._vocab_size, self._end_ids, form.field)

    def close(self) -> None:
        """Ends the threads; answers that still run get no more masks."""
        for pool in (self._compiler, self._masks):
            pool.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, form: OutputFormat) -> LLMatcher:
        """On the compiler's thread, which alone knows what is remembered."""
        matcher = self._compiled.get(form) or self._compile(form)
        self._compiled[form] = matcher
        self._compiled.move_to_end(form)
        if len(self._compiled) > MAX_REMEMBERED:
            self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _compile(self, form: OutputFormat) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, form.grammar(), log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0][:_MOST_REASON]
            raise InvalidRequest(f"no grammar can be made of it: {reason}", field=form.field)
        return matcher


class AnswerGrammar:
    """The TokenGrammar (see engine.py) of one answer."""

    def __init__(
        self,
        matcher: LLMatcher,
        pool: ThreadPoolExecutor,
        vocab_size: int,
        end_ids: frozenset[int],
        field: str,
    ) -> None:
        self._matcher = matcher
        self._pool = pool
        self._mask = allocate_token_bitmask(1, vocab_size)
        self._end_ids = end_ids
        self._field = field
        self._next: Future[NDArray[np.int32]] = pool.submit(self._compute)

    def mask(self) -> NDArray[np.int32]:
        """See TokenGrammar. Raises InvalidRequest when the form is more than can be followed."""
        return self._next.result()

    def accept(self, token_id: int) -> None:
        """See TokenGrammar."""
        self.mask()  # has been asked for already; the matcher serves one thread at a time
        if token_id not in self._end_ids:
            self._next = self._pool.submit(self._advance, token_id)

    def _advance(self, token_id: int) -> NDArray[np.int32]:
        self._matcher.consume_token(token_id)
        return self._compute()

    def _compute(self) -> NDArray[np.int32]:
        fill_next_token_bitmask(self._matcher, self._mask, 0)
        if self._matcher.is_error():
            raise InvalidRequest("the form is too complex to follow it any further", field=self._field)
        mask: NDArray[np.int32] = self._mask[0]
        return mask
