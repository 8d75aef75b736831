"""Who runs when: scenarios of a few lines (test_scheduling_at_random.py walks about)."""

from collections.abc import Iterable
from typing import Any

import pytest

from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager
from decoder_service.engine.scheduler import MOST_OVERTAKES, Advance, BatchLimits, Scheduler, Step, Wanted
from decoder_service.engine.sequence import Priority, Sequence

STOP = 9
PLAIN = 1


def scheduler(*, blocks: int = 100, size: int = 4, tokens: int = 64, waiting: int = 8) -> Scheduler:
    return Scheduler(BlockManager(blocks), BatchLimits(size, tokens, waiting))


def sequence(
    request_id: str,
    prompt: int = 10,
    output: int = 4,
    continuation: Iterable[int] = (),
    *,
    same_as: str = "",
    **rest: Any,
) -> Sequence:
    """Two sequences share nothing, unless `same_as` names what both begin with."""
    first = 100 * sum((same_as or request_id).encode())
    return Sequence.begin(
        request_id,
        range(first, first + prompt),
        max_output_tokens=output,
        stop_token_ids=frozenset({STOP}),
        continuation=continuation,
        **rest,
    )


def run(subject: Scheduler, token_id: int = PLAIN, *, now: float = 0.0) -> list[tuple[str, int, int]]:
    """One step; what it computed."""
    step = subject.schedule(now)
    advance(subject, step, token_id)
    return ranges(step)


def ranges(step: Step) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.end) for chunk in step.chunks]


def advance(subject: Scheduler, step: Step, token_id: int = PLAIN) -> list[Advance]:
    return subject.advance(step, {c.request_id: token_id for c in step.chunks if c.samples})


def test_without_work_the_step_is_empty() -> None:
    subject = scheduler()
    assert subject.schedule(0.0) == Step(())
    assert subject.wake_at is None


def test_a_prompt_that_fits_is_computed_in_one_step_and_samples() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    [chunk] = subject.schedule(0.0).chunks
    assert (chunk.start, chunk.token_ids, chunk.samples) == (0, tuple(range(9700, 9710)), True)
    assert chunk.output_index == 0
    assert not chunk.is_decode


def test_then_each_step_computes_the_newest_token() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    advance(subject, subject.schedule(0.0), token_id=42)
    [chunk] = subject.schedule(0.0).chunks
    assert (chunk.start, chunk.token_ids, chunk.output_index) == (10, (42,), 1)
    assert chunk.is_decode


def test_a_long_prompt_is_cut_at_the_budget_and_samples_at_its_end_only() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=20))
    cuts = []
    for _ in range(3):
        step = subject.schedule(0.0)
        cuts.append((*ranges(step)[0][1:], step.chunks[0].samples))
        advance(subject, step)
    assert cuts == [(0, 8, False), (8, 16, False), (16, 20, True)]


def test_decoding_goes_first_and_prompts_share_what_is_left() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=4))
    advance(subject, subject.schedule(0.0))
    subject.add(sequence("b", prompt=20))
    subject.add(sequence("c", prompt=20))
    assert ranges(subject.schedule(0.0)) == [("a", 4, 5), ("b", 0, 5), ("c", 0, 2)]


def test_an_older_prompt_is_finished_before_a_younger_one_begins() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=10))
    subject.add(sequence("b", prompt=10))
    subject.add(sequence("c", prompt=10))
    assert run(subject) == [("a", 0, 5), ("b", 0, 2), ("c", 0, 1)]
    assert run(subject) == [("a", 5, 10), ("b", 2, 4), ("c", 1, 2)]


def test_a_short_prompt_is_done_in_one_step_beside_a_very_long_one() -> None:
    subject = scheduler(tokens=64)
    subject.add(sequence("long", prompt=1000))
    assert run(subject) == [("long", 0, 64)]
    subject.add(sequence("short", prompt=20))
    assert run(subject) == [("long", 64, 108), ("short", 0, 20)]


def test_a_prompt_with_one_token_left_is_no_answer_yet() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=9))
    advance(subject, subject.schedule(0.0))
    [chunk] = subject.schedule(0.0).chunks
    assert (chunk.start, chunk.end, chunk.samples, chunk.is_decode) == (8, 9, True, False)


def test_a_free_place_is_taken_at_once_and_the_others_wait_in_line() -> None:
    subject = scheduler(size=2)
    for name in "abcd":
        subject.add(sequence(name))
    assert subject.num_waiting == 2
    run(subject)
    assert (subject.num_running, subject.num_waiting) == (2, 2)
    subject.remove("a")
    assert [name for name, *_ in run(subject)] == ["b", "c"]


def test_single_mode_runs_one_request_after_the_other() -> None:
    subject = scheduler(size=1)
    subject.add(sequence("a", output=1))
    subject.add(sequence("b", output=1))
    assert [name for name, *_ in run(subject)] == ["a"]
    assert [name for name, *_ in run(subject)] == ["b"]


def test_admission_waits_for_blocks_for_all_known_tokens_and_one_for_each_answer() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=20, output=2 * BLOCK_TOKENS))
    subject.add(sequence("b", prompt=20, output=2 * BLOCK_TOKENS))
    assert run(subject) == [("a", 0, 20)]
    assert subject.blocks.used == 2
    assert (subject.num_running, subject.num_waiting) == (1, 1)


def test_a_small_request_does_not_overtake_the_one_that_waits_for_blocks() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=3 * BLOCK_TOKENS - 4))
    subject.add(sequence("big", prompt=4 * BLOCK_TOKENS - 4))
    subject.add(sequence("small", prompt=1))
    assert [name for name, *_ in run(subject)] == ["a"]
    subject.remove("a")
    assert [name for name, *_ in run(subject)] == ["big"]


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
    run(subject)
    assert not subject.can_add(sequence("b"))


def test_a_stop_token_ends_and_frees_everything() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    [end] = advance(subject, subject.schedule(0.0), token_id=STOP)
    assert end == Advance("a", STOP, "stop")
    assert subject.num_running == 0
    assert subject.blocks.used == 0


def test_the_answer_ends_at_its_limit() -> None:
    subject = scheduler()
    subject.add(sequence("a", output=2))
    finishes = [advance(subject, subject.schedule(0.0))[0].finish for _ in range(2)]
    assert finishes == [None, "length"]


def test_the_request_that_ends_first_makes_room_while_the_others_go_on() -> None:
    subject = scheduler(size=2)
    subject.add(sequence("short", output=1))
    subject.add(sequence("long", output=50))
    subject.add(sequence("next"))
    run(subject)
    assert ranges(subject.schedule(0.0)) == [("long", 10, 11), ("next", 0, 10)]


def test_who_left_during_a_step_is_passed_over() -> None:
    subject = scheduler()
    subject.add(sequence("a"))
    subject.add(sequence("b"))
    step = subject.schedule(0.0)
    subject.remove("a")
    assert [each.request_id for each in advance(subject, step)] == ["b"]
    subject.remove("a")


def test_a_continuation_is_computed_with_the_prompt_and_counts_as_output() -> None:
    subject = scheduler()
    subject.add(sequence("a", output=4, continuation=(7, 8)))
    [chunk] = subject.schedule(0.0).chunks
    assert chunk.token_ids[-2:] == (7, 8)
    assert chunk.output_index == 2
    assert not chunk.is_decode
    finishes = [advance(subject, subject.schedule(0.0))[0].finish for _ in range(2)]
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


def test_the_second_question_about_a_picture_begins_behind_it() -> None:
    subject = scheduler()
    picture: dict[str, Any] = {"same_as": "same", "visual_spans": (((0, 32),),)}
    subject.add(sequence("a", prompt=40, output=1, feature_ids=(b"red",), **picture))
    assert subject.take_wanted() == [Wanted("a", 0)]
    subject.provide("a", 0)
    run(subject)
    subject.add(sequence("b", prompt=40, output=1, feature_ids=(b"red",), **picture))
    assert subject.take_wanted() == []
    assert run(subject) == [("b", 32, 40)]
    subject.add(sequence("c", prompt=40, output=1, feature_ids=(b"blue",), **picture))
    assert subject.take_wanted() == [Wanted("c", 0)]


def test_the_next_turn_of_a_conversation_begins_behind_the_last_answer() -> None:
    subject = scheduler()
    first = sequence("a", prompt=30, output=10)
    subject.add(first)
    for _ in range(10):
        run(subject)
    assert (subject.num_running, subject.blocks.cached) == (0, 2)
    following = Sequence.begin("b", [*first.token_ids, 7, 8], max_output_tokens=4)
    subject.add(following)
    assert run(subject) == [("b", 32, 42)]


def test_the_last_token_is_always_computed_even_when_its_block_is_known() -> None:
    subject = scheduler()
    subject.add(sequence("a", prompt=32, output=1))
    run(subject)
    subject.add(sequence("b", prompt=32, output=1, same_as="a"))
    assert run(subject) == [("b", 16, 32)]


def test_nothing_is_shared_across_roots() -> None:
    subject = scheduler()
    subject.add(sequence("a", prompt=40, output=1, prefix_root=b"one"))
    run(subject)
    subject.add(sequence("b", prompt=40, output=1, same_as="a", prefix_root=b"other"))
    assert run(subject) == [("b", 0, 40)]


def test_questions_wait_for_the_prefill_of_what_they_share_instead_of_repeating_it() -> None:
    subject = scheduler(tokens=32, size=8)
    for name in "abc":
        subject.add(sequence(name, prompt=100, same_as="same"))
    subject.add(sequence("other", prompt=4))
    assert run(subject) == [("a", 0, 28), ("other", 0, 4)]
    assert run(subject) == [("other", 4, 5), ("a", 28, 59)]
    run(subject)
    assert run(subject)[-2:] == [("b", 96, 100), ("c", 96, 100)]


def test_who_waits_for_another_s_prefill_goes_on_alone_when_that_one_leaves() -> None:
    subject = scheduler(tokens=32)
    subject.add(sequence("a", prompt=100, same_as="same"))
    subject.add(sequence("b", prompt=100, same_as="same"))
    assert run(subject) == [("a", 0, 32)]
    subject.remove("a")
    assert run(subject) == [("b", 32, 64)]


def test_features_are_asked_for_at_once_and_only_from_the_first_that_is_needed() -> None:
    spans = (((0, 32),), ((40, 20),))
    subject = scheduler()
    subject.add(sequence("a", prompt=64, visual_spans=spans, feature_ids=(b"1", b"2")))
    assert subject.take_wanted() == [Wanted("a", 0)]
    assert subject.schedule(0.0).chunks == ()
    subject.provide("a", 0)
    run(subject)
    subject.add(sequence("b", prompt=64, same_as="a", visual_spans=spans, feature_ids=(b"1", b"3")))
    assert subject.take_wanted() == [Wanted("b", 1)]


def test_who_waits_for_features_lets_others_pass_and_is_first_afterwards() -> None:
    subject = scheduler(size=1)
    subject.add(sequence("a", visual_spans=(((0, 8),),), feature_ids=(b"1",)))
    subject.add(sequence("b", output=1))
    subject.add(sequence("c", output=1))
    assert run(subject) == [("b", 0, 10)]
    subject.provide("a", 0)
    assert run(subject) == [("a", 0, 10)]


def test_features_are_asked_for_again_when_their_blocks_went_before_their_turn() -> None:
    subject = scheduler(blocks=4, size=1)
    picture: dict[str, Any] = {"visual_spans": (((0, 32),),), "feature_ids": (b"1",)}
    subject.add(sequence("a", prompt=40, output=1, **picture))
    assert subject.take_wanted() == [Wanted("a", 0)]
    subject.provide("a", 0)
    run(subject)
    subject.add(sequence("big", prompt=60, output=1))
    subject.add(sequence("b", prompt=40, output=1, same_as="a", **picture))
    assert subject.take_wanted() == []
    assert run(subject) == [("big", 0, 60)]
    assert run(subject) == []
    assert subject.take_wanted() == [Wanted("b", 0)]
    subject.provide("b", 0)
    assert run(subject) == [("b", 0, 40)]


def test_when_blocks_run_out_the_latest_gives_way_and_is_computed_again() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=16, output=40))
    subject.add(sequence("b", prompt=15, output=40))
    assert run(subject) == [("a", 0, 16), ("b", 0, 15)]
    for _ in range(16):
        assert len(run(subject)) == 2
    assert subject.num_preempted == 0
    assert run(subject) == [("a", 32, 33)]
    assert (subject.num_preempted, subject.num_running, subject.num_waiting) == (1, 1, 1)
    subject.remove("a")
    assert run(subject) == [("b", 16, 32)]  # its first block is still known


def test_an_answer_that_was_preempted_goes_on_with_its_own_tokens() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=16, output=40))
    victim = sequence("b", prompt=15, output=20)
    subject.add(victim)
    while not subject.num_preempted:
        run(subject, token_id=77)
    so_far = list(victim.token_ids)
    subject.remove("a")
    [chunk] = subject.schedule(0.0).chunks
    assert (chunk.end, chunk.samples, chunk.output_index) == (len(so_far), True, len(so_far) - 15)
    assert victim.token_ids == so_far


def test_a_preempted_picture_needs_its_features_again() -> None:
    subject = scheduler(blocks=4)
    subject.add(sequence("a", prompt=16, output=40))
    subject.add(sequence("b", prompt=15, output=40, visual_spans=(((0, 12),),), feature_ids=(b"1",)))
    subject.take_wanted()
    subject.provide("b", 0)
    run(subject)
    while subject.num_running == 2:
        run(subject)
    assert subject.take_wanted() == []  # the cache still knows the picture
    while subject.num_running:
        run(subject)
    assert subject.take_wanted() == [Wanted("b", 0)]
    subject.provide("b", 0)
    [chunk] = subject.schedule(0.0).chunks
    assert (chunk.start, chunk.output_index) == (0, 17)


def test_higher_priorities_enter_first_and_within_one_the_oldest() -> None:
    subject = scheduler(size=1)
    for name, priority in [
        ("l", Priority.LOW),
        ("n", Priority.NORMAL),
        ("h", Priority.HIGH),
        ("i", Priority.HIGH),
    ]:
        subject.add(sequence(name, output=1, priority=priority))
    assert [run(subject)[0][0] for _ in range(4)] == ["h", "i", "n", "l"]


def test_a_low_priority_has_its_turn_after_a_few_that_overtook_it() -> None:
    subject = scheduler(size=1)
    subject.add(sequence("low", output=1, priority=Priority.LOW))
    served = []
    for number in range(2 * MOST_OVERTAKES):
        subject.add(sequence(f"high {number}", output=1, priority=Priority.HIGH))
        served.append(run(subject)[0][0])
    assert served.index("low") == MOST_OVERTAKES


def test_a_window_waits_for_company_but_not_for_ever() -> None:
    limits = BatchLimits(4, 64, 8, min_batch_size=2, window_seconds=0.2)
    subject = Scheduler(BlockManager(100), limits)
    subject.add(sequence("a", arrived=10.0))
    assert run(subject, now=10.1) == []
    assert subject.wake_at == pytest.approx(10.2)
    assert run(subject, now=10.2) == [("a", 0, 10)]
    subject.add(sequence("b", arrived=10.3))  # a is company
    assert [name for name, *_ in run(subject, now=10.3)] == ["a", "b"]


def test_a_window_closes_when_enough_are_there() -> None:
    subject = Scheduler(BlockManager(100), BatchLimits(4, 64, 8, min_batch_size=2, window_seconds=0.2))
    subject.add(sequence("a", arrived=10.0))
    subject.add(sequence("b", arrived=10.0))
    assert [name for name, *_ in run(subject, now=10.0)] == ["a", "b"]


def test_other_limits_hold_from_the_next_step_on_and_who_runs_goes_on() -> None:
    subject = scheduler(size=4)
    for name in "abcd":
        subject.add(sequence(name, output=3))
    run(subject)
    subject.use(subject.limits.one_at_a_time())
    subject.add(sequence("e"))
    assert [name for name, *_ in run(subject)] == ["a", "b", "c", "d"]
    run(subject)
    subject.add(sequence("f"))
    assert [name for name, *_ in run(subject)] == ["e"]


def test_a_step_that_was_too_large_is_tried_again_by_halves() -> None:
    """B11."""
    subject = scheduler(size=8, tokens=64)
    for name in "abcd":
        subject.add(sequence(name, prompt=8))
    assert subject.retreat(subject.schedule(0.0)) is None
    assert subject.blocks.used == 0
    assert [name for name, *_ in run(subject)] == ["a", "b"]
    assert [name for name, *_ in run(subject)] == ["a", "b", "c"]


def test_what_a_failed_step_would_have_written_is_not_found() -> None:
    subject = scheduler(size=8, tokens=64)
    subject.add(sequence("a", prompt=60, same_as="same"))
    subject.add(sequence("b", prompt=60, same_as="same"))
    step = subject.schedule(0.0)
    assert ranges(step) == [("a", 0, 60), ("b", 48, 52)]
    subject.retreat(step)
    subject.remove("a")
    assert run(subject) == [("b", 0, 32)]


def test_a_request_that_is_too_large_by_itself_ends_and_the_next_one_runs() -> None:
    subject = scheduler(tokens=8)
    subject.add(sequence("a", prompt=8))
    hopeless = None
    while hopeless is None:
        hopeless = subject.retreat(subject.schedule(0.0))
    assert hopeless == "a"
    subject.add(sequence("b", prompt=8))
    assert run(subject)[0][0] == "b"


def test_who_decodes_takes_turns_while_steps_are_small() -> None:
    subject = scheduler(size=4)
    for name in "abcd":
        subject.add(sequence(name, output=40))
    run(subject)
    subject.retreat(subject.schedule(0.0))
    served = [name for _ in range(4) for name, *_ in run(subject)]
    assert set(served) == set("abcd")
    assert [name for name, *_ in ranges(subject.schedule(0.0))]


def test_under_constant_load_nobody_waits_much_longer_than_the_queue_is_long() -> None:
    """B13: half of the queue is always full, answers are of 2 to 6 tokens."""
    subject = scheduler(size=4, tokens=64, waiting=16, blocks=200)
    started: dict[int, int] = {}
    arrived: dict[int, int] = {}
    count = ended = 0
    for step_number in range(600):
        while subject.num_waiting < 8 and subject.can_add(
            added := sequence(f"r{count}", output=2 + count % 5)
        ):
            arrived[count] = step_number
            subject.add(added)
            count += 1
        step = subject.schedule(0.0)
        for chunk in step.chunks:
            started.setdefault(int(chunk.request_id[1:]), step_number)
        ended += sum(end.finish is not None for end in advance(subject, step))
    assert list(started) == sorted(started)  # first come, first served
    throughput = ended / 600
    longest = max(started[number] - arrived[number] for number in started)
    assert longest <= 8 / throughput * 1.5


def test_a_very_long_prompt_among_short_ones_neither_waits_for_ever_nor_is_padded_for() -> None:
    """B17: 10, 10, 2000, 10 tokens, and short ones that keep coming."""
    subject = scheduler(size=8, tokens=128, blocks=400, waiting=50)
    for name, length in (("a", 10), ("b", 10), ("long", 2000), ("c", 10)):
        subject.add(sequence(name, prompt=length, output=1))
    first = subject.schedule(0.0)
    assert {chunk.request_id for chunk in first.chunks if chunk.samples} == {"a", "b", "c"}
    assert first.num_tokens == sum(len(chunk.token_ids) for chunk in first.chunks) == 128
    advance(subject, first)
    steps = 1
    while subject.num_running + subject.num_waiting:
        if steps < 40:
            subject.add(sequence(f"short {steps}", output=1))
        run(subject)
        steps += 1
    assert steps <= 45
