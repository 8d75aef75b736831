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
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from decoder_service.grammar_check import packed
from decoder_service.grammar_compiler import GrammarCompiler, threads_with_stack
from decoder_service.output_format import OutputFormat
from shared.errors import InvalidRequest
from shared.isolation.workers import IsolatedWorkers, WorkerLost

MAX_REMEMBERED = 16
MASK_THREADS = 2
CHECK_SECONDS = 5
CHECK_BYTES = 128 << 20


class Grammars:
    """Compiles forms for the tokens of one checkpoint (see GrammarCompiler). Close it in the end."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self._compiler = GrammarCompiler(tokenizer_json, vocab_size=vocab_size, end_ids=end_ids)
        self._compiled: OrderedDict[OutputFormat, LLMatcher] = OrderedDict()
        self._checks = IsolatedWorkers(
            "decoder_service.grammar_check",
            self._compiler.pack(),
            num_processes=1,
            max_bytes=CHECK_BYTES,
            max_result_bytes=0,
            timeout_seconds=CHECK_SECONDS,
        )
        self._compiling = threads_with_stack(1, "grammar-compiler")
        self._masks = threads_with_stack(MASK_THREADS, "grammar-masks")

    async def begin(self, form: OutputFormat, continuation: Sequence[int]) -> "AnswerGrammar":
        """The grammar of one answer, behind the tokens that it has already.

        Raises:
            InvalidRequest: nothing can be made of the form, or the continuation does not have it.
        """
        if form not in self._compiled:
            await self._check(form)
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._compiling, self._matcher, form)
        num_taken = await loop.run_in_executor(self._masks, matcher.try_consume_tokens, list(continuation))
        if num_taken < len(continuation):
            raise InvalidRequest(
                "the tokens do not have the form of task.output_format", field="task.continuation_token_ids"
            )
        grammar = AnswerGrammar(
            matcher, self._masks, self._compiler.vocab_size, self._compiler.end_ids, form.field
        )
        await grammar.ready()  # the first set can take long: no step shall wait for it
        return grammar

    def close(self) -> None:
        """Ends the threads; answers that still run get no more masks."""
        self._checks.close()
        for pool in (self._compiling, self._masks):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _check(self, form: OutputFormat) -> None:
        try:
            await self._checks.run(packed(form))
        except WorkerLost:
            raise InvalidRequest("the form is too complex to compile it", field=form.field) from None

    def _matcher(self, form: OutputFormat) -> LLMatcher:
        """On the compiler's thread, which alone changes what is remembered."""
        matcher = self._compiled.get(form) or self._compiler.compile(form)
        self._compiled[form] = matcher
        self._compiled.move_to_end(form)
        if len(self._compiled) > MAX_REMEMBERED:
            self._compiled.popitem(last=False)
        return matcher.deep_copy()


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

    async def ready(self) -> None:
        """Returns when the next set is there. Raises as `mask` does."""
        await asyncio.wrap_future(self._next)

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
