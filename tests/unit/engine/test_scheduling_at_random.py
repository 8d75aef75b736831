"""Whatever comes, goes, runs out and fails: budgets hold, nothing leaks, nobody sees what is not theirs.

A stand-in for the model writes into slots what the keys of a token depend on, which is everything before
it, and checks for each chunk that all the slots it looks at hold its own past.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager
from decoder_service.engine.scheduler import BatchLimits, Chunk, Scheduler, Step
from decoder_service.engine.sequence import Priority, Sequence

SIZE, TOKENS, BLOCKS, WAITING = 3, 40, 9, 4
STOP, PLAIN, PAD = 9, 1, 5
PICTURES = ((), ((2, 20),), ((2, 20), (25, 10)))


@dataclass(frozen=True)
class Asked:
    """A question of `prompt` tokens; `text` tells two texts apart, `colours` what the pictures show."""

    prompt: int
    output: int
    text: int
    pictures: tuple[tuple[int, int], ...]
    colours: tuple[bytes, bytes]
    root: bytes
    priority: Priority

    @property
    def feature_ids(self) -> tuple[bytes, ...]:
        return self.colours[: len(self.pictures)]

    def contents(self) -> tuple[list[int], dict[int, object]]:
        """The tokens, and which row of which picture stands in their places."""
        token_ids = [1000 * self.text + place for place in range(self.prompt)]
        rows: dict[int, object] = {}
        for (start, count), feature_id in zip(self.pictures, self.feature_ids, strict=True):
            token_ids[start : start + count] = [PAD] * count
            rows |= {start + row: (feature_id, row) for row in range(count)}
        return token_ids, rows


COLOUR = st.sampled_from([b"red", b"tan"])
ASKED = st.builds(
    Asked,
    prompt=st.integers(36, 90),
    output=st.integers(1, 50),
    text=st.sampled_from([0, 0, 0, 1]),
    pictures=st.sampled_from(PICTURES),
    colours=st.tuples(COLOUR, COLOUR),
    root=st.sampled_from([b"", b"", b"tenant"]),
    priority=st.sampled_from(Priority),
)


class FakeModel:
    """Slots with the past of the token that was written there last."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[object, ...]] = {}

    def run(self, step: Step, pasts: dict[str, list[tuple[object, ...]]]) -> None:
        """All writes come before anyone looks."""
        for chunk in step.chunks:
            for place in range(chunk.start, chunk.end):
                self.slots[slot_of(chunk, place)] = pasts[chunk.request_id][place]
        for chunk in step.chunks:
            for place in range(chunk.end):
                assert self.slots[slot_of(chunk, place)] == pasts[chunk.request_id][place]


def slot_of(chunk: Chunk, place: int) -> int:
    return chunk.block_table[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS


class Scheduling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(BLOCKS)
        self.subject = Scheduler(self.blocks, BatchLimits(SIZE, TOKENS, WAITING))
        self.model = FakeModel()
        self.live: dict[str, Sequence] = {}
        self.contents: dict[str, tuple[bytes, dict[int, object]]] = {}
        self.loading: dict[str, int] = {}
        self.count = 0

    @rule(asked=ASKED)
    def add(self, asked: Asked) -> None:
        token_ids, rows = asked.contents()
        added = Sequence.begin(
            str(self.count),
            token_ids,
            max_output_tokens=asked.output,
            stop_token_ids=frozenset({STOP}),
            priority=asked.priority,
            visual_spans=tuple((span,) for span in asked.pictures),
            feature_ids=asked.feature_ids,
            prefix_root=asked.root,
        )
        if added.max_tokens <= self.subject.capacity_tokens and self.subject.can_add(added):
            self.count += 1
            self.live[added.request_id] = added
            self.contents[added.request_id] = (asked.root, rows)
            self.subject.add(added)
            self._note_wanted()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self._forget(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def features_arrive(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.loading)))
        self.subject.provide(request_id, self.loading.pop(request_id))

    @rule(token_id=st.sampled_from([PLAIN, PLAIN, PLAIN, 2, STOP]), leaver=st.none() | st.integers(0, 3))
    def run_step(self, token_id: int, leaver: int | None) -> None:
        step = self._schedule()
        names = sorted({chunk.request_id for chunk in step.chunks})
        self.model.run(step, {name: self._past(name) for name in names})
        if leaver is not None and leaver < len(names):
            self._forget(names[leaver])
        for end in self.subject.advance(step, {c.request_id: token_id for c in step.chunks if c.samples}):
            if end.finish is not None:
                del self.live[end.request_id]
                self.loading.pop(end.request_id, None)

    @rule(leaver=st.none() | st.integers(0, 3))
    def step_fails(self, leaver: int | None) -> None:
        """For want of memory; what it wrote so far, if anything, nobody may look at."""
        step = self._schedule()
        names = sorted({chunk.request_id for chunk in step.chunks})
        if leaver is not None and leaver < len(names):
            self._forget(names[leaver])
        hopeless = self.subject.retreat(step) if step.chunks else None
        if hopeless in self.live:
            del self.live[hopeless]

    @rule(single=st.booleans())
    def switch_mode(self, single: bool) -> None:
        limits = BatchLimits(SIZE, TOKENS, WAITING)
        self.subject.use(limits.one_at_a_time() if single else limits)

    def _schedule(self) -> Step:
        step = self.subject.schedule(0.0)
        self._note_wanted()
        assert step.num_tokens <= TOKENS
        assert step.chunks or all(name in self.loading for name in self.live)
        ends = [0, *(chunk.row_end for chunk in step.chunks)]
        assert [chunk.row for chunk in step.chunks] == ends[:-1]
        for chunk in step.chunks:
            self._check(chunk)
        return step

    def _check(self, chunk: Chunk) -> None:
        sequence = self.live[chunk.request_id]
        assert sequence.num_computed == chunk.start < chunk.end <= len(sequence.token_ids)
        assert chunk.samples == (chunk.end == len(sequence.token_ids))
        needed = [n for n, end in enumerate(sequence.feature_ends) if end > chunk.start]
        if needed and chunk.start < sequence.num_prompt_tokens:
            assert sequence.features_from is not None
            assert sequence.features_from <= needed[0]

    def _past(self, request_id: str) -> list[tuple[object, ...]]:
        """For each token, a value that is equal only for equal tokens, features and roots before it."""
        root, rows = self.contents[request_id]
        past: list[tuple[object, ...]] = []
        before: object = root
        for place, token_id in enumerate(self.live[request_id].token_ids):
            past.append((hash(before), token_id, rows.get(place)))
            before = past[-1]
        return past

    def _note_wanted(self) -> None:
        for wanted in self.subject.take_wanted():
            assert wanted.request_id in self.live
            self.loading[wanted.request_id] = wanted.first

    def _forget(self, request_id: str) -> None:
        self.subject.remove(request_id)
        del self.live[request_id]
        self.loading.pop(request_id, None)

    @invariant()
    def accounts_add_up(self) -> None:
        lent = {block for each in self.live.values() for block in each.block_table}
        assert self.blocks.used == len(lent)
        assert self.subject.num_running <= SIZE
        assert self.subject.num_waiting <= WAITING + SIZE  # a preempted one may find the queue full

    def teardown(self) -> None:
        """Everybody who stays is answered, and then nothing is lent."""
        for _ in range(5000):
            if not self.live:
                break
            for request_id in list(self.loading):
                self.features_arrive_for(request_id)
            self.run_step_plainly()
        assert not self.live
        assert self.blocks.used == 0

    def features_arrive_for(self, request_id: str) -> None:
        self.subject.provide(request_id, self.loading.pop(request_id))

    def run_step_plainly(self) -> None:
        step = self._schedule()
        self.model.run(step, {chunk.request_id: self._past(chunk.request_id) for chunk in step.chunks})
        for end in self.subject.advance(step, {c.request_id: PLAIN for c in step.chunks if c.samples}):
            if end.finish is not None:
                del self.live[end.request_id]
                self.loading.pop(end.request_id, None)


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
