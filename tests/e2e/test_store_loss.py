"""The measurement of what narrower features lose sees that loss: neither none nor too much."""

from bench.store_loss import PICTURE_KINDS, measure, report


def test_a_small_measurement() -> None:
    figures = measure(per_kind=1)
    assert figures["answers"] == len(PICTURE_KINDS)
    assert figures["bfloat16_changed_answers"] == 0
    assert figures["fp8_changed_answers"] <= 1
    assert 0.99999 < figures["bfloat16_min_cosine"] < 1
    assert 0.998 < figures["fp8_min_cosine"] < 0.9999
    levels = [figures[f"fp8_level_{level}_mean_cosine"] for level in range(4)]
    assert all(0.999 < mean < 0.9999 for mean in levels)
    assert "DeepStack 2" in report(figures)
