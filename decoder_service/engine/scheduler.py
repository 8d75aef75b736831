"""Who runs in the next step; decides and does not act. Pure: no clock, no tensors, no tasks.

Every step of the engine is one pass of the model over a packed row of tokens. What goes into the row is
decided here, anew for each step, so a request can enter and leave between any two steps:

1. *Decode first.* Each sequence that is writing its answer gets its one token. Somebody is reading it, and
   one token costs next to nothing beside the weights that the step reads anyway.
2. *Then prefill, in chunks.* What is left of `max_batch_tokens` goes to prompts, oldest first, and a prompt
   that does not fit is cut anywhere, in the middle of a picture too. One that has to be cut takes half of
   what is left, and what nobody behind it takes as well: a short question beside a very long one is
   answered in the next step, not after the whole of it.
3. *Admission* follows priority, then arrival. Whoever is next enters as soon as there is a place in the
   batch and blocks for all tokens that are known of it; it is not overtaken by a smaller one, so nothing
   starves. After `MOST_OVERTAKES` that overtook an older one of a lower priority, the oldest has its turn.
4. *Prefixes are shared.* A sequence begins behind the blocks that the cache knows already, those included
   that an earlier chunk of the very same step fills: within a layer all keys are written before anyone
   looks at them. It lets others pass while somebody in the batch is about to compute what it needs next.
   So ten questions about a new picture prefill it once.
5. *Preemption by recomputation.* Answers get blocks as they grow. When none is left, the latest sequence
   gives all of its blocks back and waits again; its tokens are known, so it is computed again as one long
   prompt, from wherever the cache still knows its beginning. Who came first is never preempted for who
   came later, so somebody always gets done.

There is one kind of work: the tokens of a sequence that the model has not seen (`num_pending`). Decoding is
the case where that is one token, a resumed or preempted answer the case where the answer's first tokens are
part of them. The step that computes the last pending token yields the next one.

Features are fetched only for who needs them: `take_wanted` names the sequences whose prefill needs tensors
that are not at hand, and until `provide` they let others pass.

The caller does three things in turn: `schedule()` gives a Step, the model runs it, `advance()` takes the
tokens that came out, or `retreat()` takes the step back when the device ran out of memory. `add`, `provide`
and `remove` may be called between any of these; a step in flight may then name a sequence that is gone, and
`advance` passes over it. Blocks change hands in `schedule` alone, never while a step runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager, blocks_for
from decoder_service.engine.sequence import Finish, Sequence

MOST_OVERTAKES = 8


@dataclass(frozen=True, slots=True, eq=False)
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
class Wanted:
    """A sequence that needs the tensors of its features from number `first` on."""

    request_id: str
    first: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`max_batch_size` sequences run at once (1: one request at a time), with `max_batch_tokens` tokens in
    a step; `max_waiting` requests wait at the most.

    The admission window: with fewer than `min_batch_size` in the batch, those who wait are admitted only
    when there are enough of them, or the oldest has waited for `window_seconds`.
    """

    max_batch_size: int = 16
    max_batch_tokens: int = 1024
    max_waiting: int = 64
    min_batch_size: int = 1
    window_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_waiting < 0:
            raise ValueError("max_batch_size must be at least 1, and max_waiting not negative")
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError("max_batch_tokens must leave each sequence of a batch one token")
        if not 1 <= self.min_batch_size <= self.max_batch_size or self.window_seconds < 0:
            raise ValueError("min_batch_size is from 1 to max_batch_size, and a window not negative")

    def one_at_a_time(self) -> "BatchLimits":
        """The same without batching."""
        return replace(self, max_batch_size=1, min_batch_size=1, window_seconds=0.0)


class Scheduler:
    """Holds the sequences, waiting and running, and fills one step after the other."""

    def __init__(self, blocks: BlockManager, limits: BatchLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._wanted: list[Wanted] = []
        self._named: list[int] = []  # the blocks that the last step fills
        self._admitted: list[Sequence] = []  # who entered in the last step
        self._num_added = 0
        self._num_steps = 0
        self._num_overtakes = 0
        self._ceiling: _Ceiling | None = None
        self._wake_at: float | None = None
        self.num_preempted = 0

    @property
    def limits(self) -> BatchLimits:
        return self._limits

    @property
    def num_waiting(self) -> int:
        """Who waits for others; not who will start with the next step."""
        return len(self._waiting) - self._num_starting(list(self._waiting.values()))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def blocks(self) -> BlockManager:
        """For looking, not for touching."""
        return self._blocks

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the empty cache holds."""
        return self._blocks.total * BLOCK_TOKENS

    @property
    def wake_at(self) -> float | None:
        """When an empty step could be followed by another one although nothing has come or gone."""
        return self._wake_at

    def use(self, limits: BatchLimits) -> None:
        """Other limits from the next step on. Who runs goes on running."""
        self._limits = limits

    def can_add(self, sequence: Sequence) -> bool:
        """True when the queue has room for all who could not start with the next step."""
        waiting = [*self._waiting.values(), sequence]
        return len(waiting) - self._num_starting(waiting) <= self._limits.max_waiting

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence that can run at all (`capacity_tokens`); ask `can_add` first."""
        assert self.can_add(sequence)
        assert sequence.max_tokens <= self.capacity_tokens
        assert sequence.finish is None
        assert sequence.request_id not in self._waiting | self._running
        self._num_added += 1
        sequence.number = self._num_added
        self._waiting[sequence.request_id] = sequence
        self._want_features(sequence, self._blocks.find(sequence.reusable_names()))

    def provide(self, request_id: str, first: int) -> None:
        """The tensors of a sequence's features from number `first` on are at hand; unknown ids are fine."""
        sequence = self._waiting.get(request_id) or self._running.get(request_id)
        if sequence is not None:
            sequence.features_from, sequence.is_loading = first, False

    def remove(self, request_id: str) -> None:
        """Forgets a sequence, wherever it is, and lets go of its blocks; unknown ids are fine."""
        self._waiting.pop(request_id, None)
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._blocks.release(sequence.block_table)

    def take_wanted(self) -> list[Wanted]:
        """Who needs tensors since the last time."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def schedule(self, now: float) -> Step:
        """The next step; empty when nobody can run (yet: see `wake_at`)."""
        self._num_steps += 1
        self._named, self._admitted, self._wake_at = [], [], None
        may_admit = not self._grow_answers()
        row = _Row(self._limits.max_batch_tokens, self._ceiling)
        for sequence in sorted(self._running.values(), key=_step_order):
            if row.is_full:
                break
            self._run(sequence, row)
        if may_admit:
            self._admit(row, now)
        for sequence, end in row.share_out_rest():
            self._name_blocks(sequence, end)
        return Step(tuple(row.chunks()))

    def advance(self, step: Step, tokens: Mapping[str, int]) -> list[Advance]:
        """Books a step that has run. `tokens` has the new token of each chunk that samples.

        A sequence that ends leaves the batch and lets go of its blocks.
        """
        self._ceiling = self._ceiling.raised(self._limits) if self._ceiling else None
        advances = []
        for chunk in step.chunks:
            sequence = self._running.get(chunk.request_id)
            if sequence is None:
                continue
            sequence.num_computed = chunk.end
            if chunk.samples:
                advances.append(self._take(sequence, tokens[chunk.request_id]))
        return advances

    def retreat(self, step: Step) -> str | None:
        """Takes back a step for which the device had too little memory; the next one is half as large.

        A request that can't be computed even alone, token by token, leaves the scheduler: its id is
        returned.
        """
        for block in self._named:
            self._blocks.forget(block)
        for sequence in self._admitted:
            if sequence.request_id in self._running:
                self._send_back(sequence)
        if step.num_tokens == 1:
            self.remove(step.chunks[0].request_id)
            return step.chunks[0].request_id
        self._ceiling = _Ceiling.half_of(step)
        return None

    def _take(self, sequence: Sequence, token_id: int) -> Advance:
        sequence.features_from = None  # the prompt is in the cache
        finish = sequence.append(token_id)
        if finish is not None:
            self.remove(sequence.request_id)
        return Advance(sequence.request_id, token_id, finish)

    def _grow_answers(self) -> bool:
        """Gives each sequence that decodes the block that it needs; True when others had to go for it."""
        before = self.num_preempted
        for sequence in sorted(self._running.values(), key=_age):
            if sequence.request_id in self._running and sequence.missing_blocks > 0:
                self._grow(sequence)
        return self.num_preempted > before

    def _grow(self, sequence: Sequence) -> None:
        while self._blocks.available < sequence.missing_blocks:
            last = max(self._running.values(), key=_age)
            self._send_back(last)
            self.num_preempted += 1
            if last is sequence:
                return
        sequence.block_table += self._blocks.allocate(sequence.missing_blocks)

    def _send_back(self, sequence: Sequence) -> None:
        """From the batch to the queue, where its number gives it its old place."""
        del self._running[sequence.request_id]
        self._blocks.release(sequence.block_table)
        sequence.start_over()
        self._waiting[sequence.request_id] = sequence

    def _run(self, sequence: Sequence, row: "_Row") -> None:
        """Gives a running sequence its part of the row."""
        sequence.last_step = self._num_steps
        self._name_blocks(sequence, row.add(sequence))

    def _name_blocks(self, sequence: Sequence, end: int) -> None:
        """Says what the blocks will hold that the step fills, when it computes the tokens up to `end`."""
        first, last = sequence.num_computed // BLOCK_TOKENS, end // BLOCK_TOKENS
        names = sequence.chain.names(last)
        for place in range(first, last):
            block = sequence.block_table[place]
            if not self._blocks.has_name(block) and self._blocks.name(block, names[place]):
                self._named.append(block)

    def _admit(self, row: "_Row", now: float) -> None:
        """Moves waiting sequences into the batch and the row, while there is room."""
        if self._is_too_early(now):
            return
        passed: set[str] = set()  # who waits for tensors, or for another's prefill, lets others pass
        while not row.is_full and len(self._running) < self._limits.max_batch_size:
            sequence = self._next_waiting(passed)
            if sequence is None:
                return
            found = self._blocks.find(sequence.reusable_names())
            if self._want_features(sequence, found) or self._is_under_way(sequence, len(found)):
                passed.add(sequence.request_id)
            elif self._enter(sequence, found):
                self._run(sequence, row)
            else:
                return

    def _is_too_early(self, now: float) -> bool:
        """True while the admission window is open: a fuller batch may come together."""
        limits = self._limits
        if not self._waiting or len(self._waiting) + len(self._running) >= limits.min_batch_size:
            return False
        closes = min(sequence.arrived for sequence in self._waiting.values()) + limits.window_seconds
        self._wake_at = closes if closes > now else None
        return closes > now

    def _next_waiting(self, passed: set[str]) -> Sequence | None:
        waiting = [each for each in self._waiting.values() if each.request_id not in passed]
        if not waiting:
            return None
        first, oldest = min(waiting, key=_order), min(waiting, key=_age)
        return oldest if self._num_overtakes >= MOST_OVERTAKES else first

    def _want_features(self, sequence: Sequence, found: list[int]) -> bool:
        """True when prefill behind the blocks `found` needs tensors that have to be fetched first."""
        first = sequence.first_missing_feature(len(found) * BLOCK_TOKENS)
        if first is not None and not sequence.is_loading:
            sequence.is_loading = True
            self._wanted.append(Wanted(sequence.request_id, first))
        return first is not None

    def _is_under_way(self, sequence: Sequence, place: int) -> bool:
        """True when somebody who runs will compute the block at `place` of the sequence in a later step."""
        names = sequence.reusable_names()
        if place == len(names):
            return False
        others = (each for each in self._running.values() if each.num_computed <= place * BLOCK_TOKENS)
        return any(names[place] in each.reusable_names()[place : place + 1] for each in others)

    def _enter(self, sequence: Sequence, found: list[int]) -> bool:
        """Gives a sequence its place and blocks for its known tokens; False when too few are left.

        One block is left over for each answer that grows, so that who enters does not push others out.
        """
        count = blocks_for(len(sequence.token_ids)) - len(found)
        if not self._blocks.can_lend(found, count, spare=len(self._running)):
            return False
        is_overtaking = any(
            each.number < sequence.number and each.priority > sequence.priority
            for each in self._waiting.values()
        )
        self._num_overtakes = self._num_overtakes + 1 if is_overtaking else 0
        del self._waiting[sequence.request_id]
        sequence.block_table = self._blocks.share(found) + self._blocks.allocate(count)
        sequence.num_computed = len(found) * BLOCK_TOKENS
        self._running[sequence.request_id] = sequence
        self._admitted.append(sequence)
        return True

    def _num_starting(self, sequences: list[Sequence]) -> int:
        """How many of them there are places and blocks for, even if they share none."""
        places = max(0, self._limits.max_batch_size - len(self._running))
        left = self._blocks.available - len(self._running)
        for number, sequence in enumerate(sequences[:places]):
            left -= blocks_for(len(sequence.token_ids))
            if left < 0:
                return number
            left -= 1  # for its answer
        return min(places, len(sequences))


class _Row:
    """The row of a step as it is filled: who has how many of its tokens."""

    def __init__(self, max_tokens: int, ceiling: "_Ceiling | None") -> None:
        self._left = min(max_tokens, ceiling.tokens) if ceiling else max_tokens
        self._max_chunks = ceiling.chunks if ceiling else max_tokens
        self._counts: dict[Sequence, int] = {}

    @property
    def is_full(self) -> bool:
        return self._left == 0 or len(self._counts) == self._max_chunks

    def add(self, sequence: Sequence) -> int:
        """Takes tokens of a sequence; returns where they end."""
        fits = sequence.num_pending <= self._left
        self._take(sequence, sequence.num_pending if fits else max(1, self._left // 2))
        return sequence.num_computed + self._counts[sequence]

    def share_out_rest(self) -> Iterator[tuple[Sequence, int]]:
        """Gives what is left to who was cut, first come, first served; yields them and their new ends."""
        for sequence, count in self._counts.items():
            more = min(self._left, sequence.num_pending - count)
            if more > 0:
                self._take(sequence, more)
                yield sequence, sequence.num_computed + self._counts[sequence]

    def chunks(self) -> Iterator[Chunk]:
        row = 0
        for sequence, count in self._counts.items():
            start = sequence.num_computed
            yield Chunk(
                request_id=sequence.request_id,
                row=row,
                start=start,
                token_ids=tuple(sequence.token_ids[start : start + count]),
                samples=count == sequence.num_pending,
                output_index=sequence.num_output_tokens,
                block_table=sequence.block_table,
            )
            row += count

    def _take(self, sequence: Sequence, count: int) -> None:
        self._counts[sequence] = self._counts.get(sequence, 0) + count
        self._left -= count


@dataclass(frozen=True, slots=True)
class _Ceiling:
    """How large a step may be after one was too large for the device; it rises again step by step."""

    chunks: int
    tokens: int

    @classmethod
    def half_of(cls, step: Step) -> "_Ceiling":
        return cls(max(1, len(step.chunks) // 2), max(1, step.num_tokens // 2))

    def raised(self, limits: BatchLimits) -> "_Ceiling | None":
        higher = _Ceiling(self.chunks + 1, self.tokens + max(1, self.tokens // 8))
        is_needed = higher.chunks < limits.max_batch_size or higher.tokens < limits.max_batch_tokens
        return higher if is_needed else None


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.number


def _age(sequence: Sequence) -> int:
    return sequence.number


def _step_order(sequence: Sequence) -> tuple[bool, int, tuple[int, int]]:
    """Who decodes comes first; of them, who was left out of the last step, if that was too small for all."""
    return not sequence.is_decoding, sequence.last_step if sequence.is_decoding else 0, _order(sequence)
