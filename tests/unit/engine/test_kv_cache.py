"""Block accounting, by rule and by random walk."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder_service.engine.kv_cache import BlockManager, blocks_for


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_begun_block_is_a_block(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def named(manager: BlockManager, *names: bytes) -> list[int]:
    """A block table whose blocks hold what `names` say."""
    table = manager.allocate(len(names))
    for block, name in zip(table, names, strict=True):
        assert manager.name(block, name)
    return table


def test_lends_what_is_free_and_no_more() -> None:
    manager = BlockManager(3)
    assert manager.can_lend([], 3)
    assert not manager.can_lend([], 4)
    assert not manager.can_lend([], 3, spare=1)
    table = manager.allocate(2)
    assert (manager.used, manager.available) == (2, 1)
    manager.release(table)
    assert (manager.used, manager.available) == (0, 3)


def test_what_a_block_held_is_found_after_it_was_let_go() -> None:
    manager = BlockManager(3)
    table = named(manager, b"a", b"b")
    manager.release(table)
    assert (manager.used, manager.cached) == (0, 2)
    assert manager.find([b"a", b"b", b"c"]) == table
    assert manager.share(table) == table
    assert (manager.used, manager.cached) == (2, 0)


def test_only_an_unbroken_beginning_is_found() -> None:
    manager = BlockManager(3)
    table = named(manager, b"a", b"b", b"c")
    manager.forget(table[1])
    assert manager.find([b"a", b"b", b"c"]) == table[:1]
    assert manager.find([b"b", b"c"]) == []


def test_a_block_is_lent_to_many_and_free_when_the_last_one_lets_go() -> None:
    manager = BlockManager(2)
    table = named(manager, b"a")
    manager.share(table)
    manager.release(table)
    assert manager.used == 1
    manager.release(table)
    assert (manager.used, manager.cached) == (0, 1)


def test_found_blocks_that_nobody_has_count_as_taken() -> None:
    manager = BlockManager(3)
    table = named(manager, b"a", b"b")
    manager.release(table)
    assert manager.can_lend(table, 1)
    assert not manager.can_lend(table, 2)


def test_the_block_let_go_the_longest_time_ago_is_given_up_first() -> None:
    manager = BlockManager(3)
    first, second = named(manager, b"a"), named(manager, b"b", b"c")
    manager.release(first)
    manager.release(second)
    manager.release(manager.share(first))  # used again
    assert manager.allocate(1) == second[1:]
    assert manager.num_evicted == 1
    assert manager.find([b"a"]) == first
    assert manager.find([b"b"]) == second[:1]
    assert manager.find([b"b", b"c"]) == second[:1]


def test_of_one_sequence_the_end_is_given_up_before_the_beginning() -> None:
    manager = BlockManager(3)
    table = named(manager, b"a", b"b", b"c")
    manager.release(table)
    manager.allocate(2)
    assert manager.find([b"a", b"b", b"c"]) == table[:1]


def test_blocks_without_a_name_are_taken_before_any_is_given_up() -> None:
    manager = BlockManager(2)
    manager.release(named(manager, b"a"))
    manager.allocate(1)
    assert (manager.num_evicted, manager.cached) == (0, 1)


def test_a_second_block_of_the_same_contents_stays_nameless() -> None:
    manager = BlockManager(2)
    first = named(manager, b"a")
    other = manager.allocate(1)
    assert not manager.name(other[0], b"a")
    assert manager.find([b"a"]) == first
    manager.release(other)
    assert manager.cached == 0


def test_a_name_that_never_came_true_is_taken_back_wherever_the_block_is() -> None:
    manager = BlockManager(2)
    lent, gone = named(manager, b"a"), named(manager, b"b")
    manager.release(gone)
    manager.forget(lent[0])
    manager.forget(gone[0])
    assert manager.find([b"a"]) == manager.find([b"b"]) == []
    assert (manager.used, manager.available, manager.cached) == (1, 1, 0)


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(0)


class BlockAccounting(RuleBasedStateMachine):
    """No block is lost or lent without a reason, and each holds what its name says."""

    TOTAL = 8

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.TOTAL)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # what was written to a block since it was allocated

    @rule(count=st.integers(0, TOTAL), prefix=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4))
    def begin(self, count: int, prefix: list[bytes]) -> None:
        found = self.manager.find(prefix)
        assert [self.contents[block] for block in found] == prefix[: len(found)]
        if self.manager.can_lend(found, count):
            table = self.manager.share(found)
            for block in self.manager.allocate(count):
                assert not any(block in other for other in self.tables)
                self.contents.pop(block, None)
                table.append(block)
            self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def fill(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        if not self.manager.has_name(block) and self.manager.name(block, name):
            self.contents[block] = name

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.manager.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def accounts_add_up(self) -> None:
        lent = {block for table in self.tables for block in table}
        assert self.manager.used == len(lent)
        assert self.manager.available == self.TOTAL - len(lent)


TestBlockAccounting = BlockAccounting.TestCase
