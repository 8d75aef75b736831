"""Names of blocks: equal for equal contents and for nothing else."""

import itertools

import pytest

from decoder_service.engine.kv_cache import BLOCK_TOKENS
from decoder_service.engine.prefix import PrefixChain, VisualStretch, visual_stretches

PAD = 9
TOKENS = tuple(range(3 * BLOCK_TOKENS))


def names(token_ids: tuple[int, ...], *stretches: VisualStretch, root: bytes = b"tenant") -> list[bytes]:
    return list(PrefixChain(token_ids, stretches, root).names(len(token_ids) // BLOCK_TOKENS))


def picture(start: int, count: int, feature_id: bytes = b"red", first_row: int = 0) -> VisualStretch:
    return VisualStretch(start, start + count, feature_id, first_row)


def test_the_same_prompt_has_the_same_names() -> None:
    assert names(TOKENS, picture(3, 40)) == names(TOKENS, picture(3, 40))


def test_a_longer_prompt_begins_with_the_same_names() -> None:
    assert names((*TOKENS, *TOKENS))[:3] == names(TOKENS)


def test_names_of_one_prompt_are_all_different() -> None:
    same = (PAD,) * 8 * BLOCK_TOKENS
    assert len(set(names(same, picture(0, len(same))))) == 8


@pytest.mark.parametrize("place", [0, BLOCK_TOKENS - 1, BLOCK_TOKENS, 3 * BLOCK_TOKENS - 1])
def test_a_different_token_changes_its_block_and_all_behind_it(place: int) -> None:
    other = list(TOKENS)
    other[place] += 1
    changed = [a != b for a, b in zip(names(TOKENS), names(tuple(other)), strict=True)]
    assert changed == [block >= place // BLOCK_TOKENS for block in range(3)]


@pytest.mark.parametrize("start", range(BLOCK_TOKENS + 1))
def test_another_picture_at_the_same_place_changes_the_name(start: int) -> None:
    red, tan = names(TOKENS, picture(start, 20)), names(TOKENS, picture(start, 20, b"tan"))
    first = start // BLOCK_TOKENS
    assert red[:first] == tan[:first]
    assert all(a != b for a, b in zip(red[first:], tan[first:], strict=True))


def test_everything_that_says_what_stands_where_is_in_the_name() -> None:
    """The same tokens with nothing, one picture, two of them, in other orders, places and rows."""
    pads = (PAD,) * BLOCK_TOKENS
    variants = [
        (),
        (picture(0, 16),),
        (picture(0, 16, b"tan"),),
        (picture(0, 15),),
        (picture(1, 15),),
        (picture(0, 16, first_row=16),),
        (picture(0, 8), picture(8, 8)),
        (picture(0, 8), picture(8, 8, first_row=8)),
        (picture(0, 8), picture(8, 8, b"tan")),
        (picture(0, 8, b"tan"), picture(8, 8)),
        (picture(0, 7), picture(8, 8)),
    ]
    found = [names(pads, *variant)[0] for variant in variants]
    found += [names(pads, *variant, root=b"another tenant")[0] for variant in variants]
    assert len(set(found)) == len(found)


def test_ids_that_join_to_the_same_bytes_are_told_apart() -> None:
    """Fields are framed by their length."""
    pads = (PAD,) * BLOCK_TOKENS
    one = names(pads, picture(0, 8, b"ab"), picture(8, 8, b"c"))
    other = names(pads, picture(0, 8, b"a"), picture(8, 8, b"bc"))
    assert one != other


def test_a_picture_over_many_blocks_names_each_by_its_rows() -> None:
    pads = (PAD,) * 4 * BLOCK_TOKENS
    whole = names(pads, picture(5, 50))
    parts = names(pads, picture(5, 20), picture(25, 30, first_row=20))
    assert whole[0] == parts[0]  # the first block sees the same rows of the same feature
    assert all(a != b for a, b in itertools.pairwise(whole))


def test_names_come_out_the_same_however_they_are_asked_for() -> None:
    chain = PrefixChain(TOKENS, (picture(3, 40),), b"tenant")
    one_by_one = [chain.names(count)[count - 1] for count in (1, 2, 3)]
    assert one_by_one == names(TOKENS, picture(3, 40))


def test_a_growing_answer_gets_names_as_its_blocks_fill() -> None:
    token_ids = list(TOKENS[:-1])
    chain = PrefixChain(token_ids, (), b"tenant")
    assert len(chain.names(2)) == 2
    token_ids.append(TOKENS[-1])
    assert list(chain.names(3)) == names(TOKENS)


def test_the_stretches_of_a_clip_are_the_rows_of_one_feature() -> None:
    spans = (((2, 4), (9, 4)), ((20, 6),))
    assert list(visual_stretches(spans, (b"clip", b"red"))) == [
        VisualStretch(2, 6, b"clip", 0),
        VisualStretch(9, 13, b"clip", 4),
        VisualStretch(20, 26, b"red", 0),
    ]
