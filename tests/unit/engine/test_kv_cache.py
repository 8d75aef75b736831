"""Block accounting, by rule and by random walk."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager, blocks_for


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_begun_block_is_a_block(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def test_lends_what_is_free_and_no_more() -> None:
    manager = BlockManager(3)
    assert manager.can_allocate(3 * BLOCK_TOKENS)
    assert not manager.can_allocate(3 * BLOCK_TOKENS + 1)
    table = manager.allocate(BLOCK_TOKENS + 1)
    assert len(table) == 2
    assert manager.used == 2
    assert not manager.can_allocate(BLOCK_TOKENS + 1)
    manager.free(table)
    assert manager.used == 0


def test_a_block_that_was_just_freed_is_lent_last() -> None:
    manager = BlockManager(3)
    first = manager.allocate(1)
    manager.free(first)
    assert first[0] == manager.allocate(3 * BLOCK_TOKENS)[-1]


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockManager(0)


class BlockAccounting(RuleBasedStateMachine):
    """No block is ever lent twice, and none is lost."""

    TOTAL = 12

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.TOTAL)
        self.tables: list[list[int]] = []

    @rule(tokens=st.integers(1, BLOCK_TOKENS * 14))
    def allocate(self, tokens: int) -> None:
        if self.manager.can_allocate(tokens):
            self.tables.append(self.manager.allocate(tokens))
            assert len(self.tables[-1]) == blocks_for(tokens)
        else:
            assert blocks_for(tokens) > self.TOTAL - self.manager.used

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.manager.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def lent_once(self) -> None:
        lent = [block for table in self.tables for block in table]
        assert len(lent) == len(set(lent)) == self.manager.used
        assert set(lent) <= set(range(self.TOTAL))


TestBlockAccounting = BlockAccounting.TestCase
