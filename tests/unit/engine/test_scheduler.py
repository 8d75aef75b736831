"""Who runs when: scenarios of a few lines, and a random walk."""

from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager
from decoder_service.engine.scheduler import Advance, BatchLimits, Scheduler, Step
from decoder_service.engine.sequence import Sequence

STOP = 9
PLAIN = 1


def scheduler(*, blocks: int = 100, size: int = 4, tokens: int = 64, waiting: int = 8) -> Scheduler:
    return Scheduler(BlockManager(blocks), BatchLimits(size, tokens, waiting))


def sequence(
    request_id: str, prompt: int = 10, output: int = 4, continuation: Iterable[int] = ()
) -> Sequence:
    return Sequence.begin(
        request_id,
        range(100, 100 + prompt),
        max_output_tokens=output,
        stop_token_ids=frozenset({STOP}),
        continuation=continuation,
    )


def ranges(step: Step) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.end) for chunk in step.chunks]


def advance(subject: Scheduler, step: Step, token_id: int = PLAIN) -> list[Advance]:
    return subject.advance(step, {c.request_id: token_id for c in step.chunks if c.samples})


def test_without_work_the_step_is_empty() -> None:
    subject = scheduler()
    assert not subject.has_work
    assert subject.schedule() == Step(())


def test_a_prompt_that_fits_is_computed_in_one_step_and_samples() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    [chunk] = subject.schedule().chunks
    assert (chunk.start, chunk.token_ids, chunk.samples) == (0, tuple(range(100, 110)), True)
    assert chunk.output_index == 0
    assert not chunk.is_decode


def test_then_each_step_computes_the_newest_token() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    advance(subject, subject.schedule(), token_id=42)
    [chunk] = subject.schedule().chunks
    assert (chunk.start, chunk.token_ids, chunk.output_index) == (10, (42,), 1)
    assert chunk.is_decode


def test_a_long_prompt_is_cut_at_the_budget_and_samples_at_its_end_only() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=20))
    cuts = []
    for _ in range(3):
        step = subject.schedule()
        cuts.append((*ranges(step)[0][1:], step.chunks[0].samples))
        advance(subject, step)
    assert cuts == [(0, 8, False), (8, 16, False), (16, 20, True)]


def test_decoding_goes_first_and_prompts_share_what_is_left() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=4))
    advance(subject, subject.schedule())
    subject.add(sequence("b", prompt=20))
    subject.add(sequence("c", prompt=20))
    assert ranges(subject.schedule()) == [("a", 4, 5), ("b", 0, 7)]


def test_an_older_prompt_is_finished_before_a_younger_one_begins() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=10))
    subject.add(sequence("b", prompt=10))
    advance(subject, subject.schedule())
    assert ranges(subject.schedule()) == [("a", 8, 10), ("b", 0, 6)]


def test_a_prompt_with_one_token_left_is_no_answer_yet() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=9))
    advance(subject, subject.schedule())
    [chunk] = subject.schedule().chunks
    assert (chunk.start, chunk.end, chunk.samples, chunk.is_decode) == (8, 9, True, False)


def test_a_free_place_is_taken_at_once_and_the_others_wait_in_line() -> None:
    subject = scheduler(size=2)
    for name in "abcd":
        subject.add(sequence(name))
    assert (subject.num_running, subject.num_waiting) == (2, 2)
    subject.remove("a")
    assert [name for name, *_ in ranges(subject.schedule())] == ["b", "c"]


def test_single_mode_runs_one_request_after_the_other() -> None:
    subject = scheduler(size=1)
    subject.add(sequence("a", output=1))
    subject.add(sequence("b", output=1))
    assert [name for name, *_ in ranges(subject.schedule())] == ["a"]
    [end] = advance(subject, subject.schedule())
    assert end == Advance("a", PLAIN, "length")
    assert [name for name, *_ in ranges(subject.schedule())] == ["b"]


def test_admission_reserves_the_longest_answer_and_waits_for_blocks() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=10, output=2 * BLOCK_TOKENS))
    subject.add(sequence("b", prompt=10, output=2 * BLOCK_TOKENS))
    assert subject.blocks_used == 3
    assert (subject.num_running, subject.num_waiting) == (1, 1)


def test_a_small_request_does_not_overtake_the_one_that_waits_for_blocks() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=3 * BLOCK_TOKENS - 4))
    subject.add(sequence("big", prompt=4 * BLOCK_TOKENS - 4))
    subject.add(sequence("small", prompt=1))
    assert [name for name, *_ in ranges(subject.schedule())] == ["a"]
    subject.remove("a")
    assert [name for name, *_ in ranges(subject.schedule())] == ["big"]


def test_the_queue_is_bounded_by_those_who_wait() -> None:
    subject = scheduler(size=2, waiting=1)
    for name in "abc":
        assert subject.can_add(sequence(name))
        subject.add(sequence(name))
    assert not subject.can_add(sequence("d"))
    subject.remove("c")
    assert subject.can_add(sequence("d"))


def test_without_a_queue_a_request_starts_or_is_refused() -> None:
    subject = scheduler(size=1, waiting=0)
    subject.add(sequence("a"))
    assert not subject.can_add(sequence("b"))


def test_a_stop_token_ends_and_frees_everything() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    [end] = advance(subject, subject.schedule(), token_id=STOP)
    assert end == Advance("a", STOP, "stop")
    assert not subject.has_work
    assert subject.blocks_used == 0


def test_the_answer_ends_at_its_limit() -> None:
    subject = scheduler()
    subject.add(sequence("a", output=2))
    finishes = [advance(subject, subject.schedule())[0].finish for _ in range(2)]
    assert finishes == [None, "length"]


def test_the_request_that_ends_first_makes_room_while_the_others_go_on() -> None:
    subject = scheduler(size=2)
    subject.add(sequence("short", output=1))
    subject.add(sequence("long", output=50))
    subject.add(sequence("next"))
    advance(subject, subject.schedule())
    assert ranges(subject.schedule()) == [("long", 10, 11), ("next", 0, 10)]


def test_who_left_during_a_step_is_passed_over() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    subject.add(sequence("b"))
    step = subject.schedule()
    subject.remove("a")
    assert [each.request_id for each in advance(subject, step)] == ["b"]
    subject.remove("a")


def test_a_continuation_is_computed_with_the_prompt_and_counts_as_output() -> None:
    subject = scheduler()
    subject.add(sequence("a", output=4, continuation=(7, 8)))
    [chunk] = subject.schedule().chunks
    assert chunk.token_ids[-2:] == (7, 8)
    assert chunk.output_index == 2
    assert not chunk.is_decode
    finishes = [advance(subject, subject.schedule())[0].finish for _ in range(2)]
    assert finishes == [None, "length"]


@pytest.mark.parametrize(
    ("continuation", "finish"), [((), None), ((1,), None), ((1, STOP), "stop"), ((1, 2, 3, 4), "length")]
)
def test_a_continuation_may_be_complete_already(continuation: tuple[int, ...], finish: str | None) -> None:
    assert sequence("a", output=4, continuation=continuation).finish == finish


@pytest.mark.parametrize("limits", [(0, 64, 8), (4, 3, 8), (4, 64, -1)])
def test_limits_that_could_not_work_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        BatchLimits(*limits)


class Scheduling(RuleBasedStateMachine):
    """Whatever comes, goes and ends: budgets hold, order holds, blocks add up, everyone is served."""

    SIZE, TOKENS, BLOCKS = 3, 8, 10

    def __init__(self) -> None:
        super().__init__()
        self.subject = scheduler(blocks=self.BLOCKS, size=self.SIZE, tokens=self.TOKENS, waiting=4)
        self.count = 0
        self.live: dict[str, Sequence] = {}
        self.first_seen: list[str] = []

    @rule(prompt=st.integers(1, 60), output=st.integers(1, 60))
    def add(self, prompt: int, output: int) -> None:
        added = sequence(str(self.count), prompt, output)
        if self.subject.can_add(added):
            self.live[added.request_id] = added
            self.subject.add(added)
            self.count += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.subject.remove(request_id)
        del self.live[request_id]

    @rule(stops=st.booleans())
    def run_step(self, stops: bool) -> None:
        step = self.subject.schedule()
        assert step.num_tokens <= self.TOKENS
        assert bool(step.chunks) == bool(self.live)
        ends = [0, *(chunk.row_end for chunk in step.chunks)]
        assert [chunk.row for chunk in step.chunks] == ends[:-1]
        for chunk in step.chunks:
            self._check_chunk(chunk.request_id, chunk.start, chunk.end, chunk.samples)
        for end in advance(self.subject, step, STOP if stops else PLAIN):
            if end.finish is not None:
                del self.live[end.request_id]

    def _check_chunk(self, request_id: str, start: int, end: int, samples: bool) -> None:
        state = self.live[request_id]
        assert state.num_computed == start < end <= len(state.token_ids)
        assert samples == (end == len(state.token_ids))
        assert len(state.block_table) * BLOCK_TOKENS >= state.max_tokens
        if request_id not in self.first_seen:
            self.first_seen.append(request_id)

    @invariant()
    def accounts_add_up(self) -> None:
        tables = [block for each in self.live.values() for block in each.block_table]
        assert len(tables) == len(set(tables)) == self.subject.blocks_used
        assert self.subject.num_running <= self.SIZE
        assert self.subject.num_running + self.subject.num_waiting == len(self.live)

    @invariant()
    def first_come_first_served(self) -> None:
        assert [int(request_id) for request_id in self.first_seen] == sorted(map(int, self.first_seen))


TestScheduling = Scheduling.TestCase
