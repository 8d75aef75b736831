"""Who runs in the next step; decides and does not act. Pure: no clock, no tensors, no tasks.

Every step of the engine is one pass of the model over a packed row of tokens. What goes into the row is
decided here, anew for each step, so a request can enter and leave between any two steps:

1. *Decode first.* Each sequence that is writing its answer gets its one token. Somebody is reading it, and
   one token costs next to nothing beside the weights that the step reads anyway.
2. *Then prefill, in chunks.* What is left of `max_batch_tokens` goes to prompts, oldest first, and a prompt
   that does not fit is cut wherever the budget ends, in the middle of a picture too. A long prompt thus
   delays its neighbours' next token by one bounded step, not by its whole length.
3. *Admission is first come, first served.* The oldest waiting request enters as soon as there is a place in
   the batch and blocks for all that it may ever need. It is not overtaken by a smaller one, so nothing
   starves; and nothing that was admitted dies in the middle (see kv_cache.py). Whoever finds a free place
   enters at once, so the queue holds only those who really wait, and its bound means what it says.

There is one kind of work: the tokens of a sequence that the model has not seen (`num_pending`). Decoding is
the case where that is one token, a resumed answer the case where the answer's first tokens are part of
them. The step that computes the last pending token yields the next one.

The caller does three things in turn: `schedule()` gives a Step, the model runs it, `advance()` takes the
tokens that came out. `add` and `remove` may be called between any of these; a step in flight may then name
a sequence that is gone, and `advance` passes over it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager
from decoder_service.engine.sequence import Finish, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `[start, end)` of one sequence, computed in the rows `[row, row_end)` of one step.

    `samples` is True when they are the last ones known, so that the model's output at the last of them is
    the answer's token number `output_index`. `block_table` is the sequence's own list: it only grows at its
    end, and a sequence that lost its blocks gets another list.
    """

    request_id: str
    row: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    output_index: int
    block_table: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def row_end(self) -> int:
        return self.row + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """True for one token of the answer; else the chunk is (a part of) a prompt."""
        return len(self.token_ids) == 1 and self.output_index > 0


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the model: chunks in the order of their rows, those that decode first."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].row_end if self.chunks else 0


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step meant for one sequence: its new token, and why it ended if it did."""

    request_id: str
    token_id: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_batch_size` sequences run at once (1: one request at a time), with `max_batch_tokens` tokens in
    a step; `max_waiting` requests wait at the most.
    """

    max_batch_size: int = 16
    max_batch_tokens: int = 1024
    max_waiting: int = 64

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_waiting < 0:
            raise ValueError("max_batch_size must be at least 1, and max_waiting not negative")
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError("max_batch_tokens must leave each sequence of a batch one token")


class Scheduler:
    """Holds the sequences, waiting and running, and fills one step after the other."""

    def __init__(self, blocks: BlockManager, limits: BatchLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def blocks_used(self) -> int:
        return self._blocks.used

    @property
    def blocks_total(self) -> int:
        return self._blocks.total

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the empty cache holds."""
        return self._blocks.total * BLOCK_TOKENS

    def can_add(self, sequence: Sequence) -> bool:
        """True when the sequence could start now or the queue has room."""
        starts = not self._waiting and self._has_room_for(sequence)
        return starts or len(self._waiting) < self._limits.max_waiting

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence that can run at all (`capacity_tokens`); ask `can_add` first."""
        assert self.can_add(sequence)
        assert sequence.max_tokens <= self.capacity_tokens
        assert sequence.finish is None
        assert sequence.request_id not in self._waiting | self._running
        self._waiting[sequence.request_id] = sequence
        self._admit()

    def remove(self, request_id: str) -> None:
        """Forgets a sequence, wherever it is, and frees its blocks; unknown ids are fine."""
        self._waiting.pop(request_id, None)
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._blocks.free(sequence.block_table)
        self._admit()

    def schedule(self) -> Step:
        """The next step; empty when there is no work."""
        chunks: list[Chunk] = []
        row, rows = 0, self._limits.max_batch_tokens
        for sequence in sorted(self._running.values(), key=lambda sequence: not sequence.is_decoding):
            if row == rows:
                break
            chunks.append(_next_chunk(sequence, row, rows - row))
            row = chunks[-1].row_end
        return Step(tuple(chunks))

    def advance(self, step: Step, tokens: Mapping[str, int]) -> list[Advance]:
        """Books a step that has run. `tokens` has the new token of each chunk that samples.

        A sequence that ends leaves the batch and frees its blocks.
        """
        advances = []
        for chunk in step.chunks:
            sequence = self._running.get(chunk.request_id)
            if sequence is None:
                continue
            sequence.num_computed = chunk.end
            if chunk.samples:
                advances.append(self._take(sequence, tokens[chunk.request_id]))
        return advances

    def _take(self, sequence: Sequence, token_id: int) -> Advance:
        finish = sequence.append(token_id)
        if finish is not None:
            self.remove(sequence.request_id)
        return Advance(sequence.request_id, token_id, finish)

    def _admit(self) -> None:
        """Moves waiting sequences into the batch, oldest first, while there is room."""
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if not self._has_room_for(oldest):
                return
            del self._waiting[oldest.request_id]
            oldest.block_table = self._blocks.allocate(oldest.max_tokens)
            self._running[oldest.request_id] = oldest

    def _has_room_for(self, sequence: Sequence) -> bool:
        has_place = len(self._running) < self._limits.max_batch_size
        return has_place and self._blocks.can_allocate(sequence.max_tokens)


def _next_chunk(sequence: Sequence, row: int, budget: int) -> Chunk:
    start = sequence.num_computed
    count = min(budget, sequence.num_pending)
    return Chunk(
        request_id=sequence.request_id,
        row=row,
        start=start,
        token_ids=tuple(sequence.token_ids[start : start + count]),
        samples=count == sequence.num_pending,
        output_index=sequence.num_output_tokens,
        block_table=sequence.block_table,
    )
