"""Wishes, defaults and limits of media settings."""

import pytest

from encoder_service.media_settings import PixelPolicy, RequestedSettings
from shared.errors import InvalidMediaSettings
from shared.features.key import EffectiveSettings

POLICY = PixelPolicy(
    default_min_pixels=4096, default_max_pixels=65536, limit_min_pixels=10_000, limit_max_pixels=100_000
)
HUB_BUDGET = (65_536, 16_777_216)


def of_server(
    *,
    checkpoint_budget: tuple[int, int] = HUB_BUDGET,
    default_min_pixels: int | None = None,
    default_max_pixels: int | None = None,
    limit_max_pixels: int | None = None,
) -> PixelPolicy:
    return PixelPolicy.of_server(
        checkpoint_budget=checkpoint_budget,
        default_min_pixels=default_min_pixels,
        default_max_pixels=default_max_pixels,
        limit_min_pixels=1_048_576,
        limit_max_pixels=limit_max_pixels,
    )


def refusal(requested: RequestedSettings, policy: PixelPolicy = POLICY) -> InvalidMediaSettings:
    with pytest.raises(InvalidMediaSettings) as caught:
        policy.resolve(requested)
    return caught.value


def test_what_is_unset_takes_the_default() -> None:
    assert POLICY.resolve(RequestedSettings()) == EffectiveSettings(
        do_resize=True, min_pixels=4096, max_pixels=65536
    )
    assert POLICY.resolve(RequestedSettings(max_pixels=5000)).max_pixels == 5000


def test_the_same_effective_value_is_the_same_settings() -> None:
    spelt_out = RequestedSettings(min_pixels=4096, max_pixels=65536, do_resize=True)
    assert POLICY.resolve(spelt_out) == POLICY.resolve(RequestedSettings())


# I14
def test_reversed_budgets_are_refused_with_both_values() -> None:
    error = refusal(RequestedSettings(min_pixels=1_000_000, max_pixels=100_000))
    assert "1000000" in error.message
    assert "100000" in error.message
    assert error.metadata == {"min_pixels": "1000000", "max_pixels": "100000"}


def test_a_wish_that_contradicts_a_default_is_refused_with_both_values() -> None:
    error = refusal(RequestedSettings(max_pixels=1000))
    assert error.field == "settings.max_pixels"
    assert "4096" in error.message


# I16
def test_a_request_may_not_raise_a_limit() -> None:
    error = refusal(RequestedSettings(max_pixels=100_001, field="queries[2].settings"))
    assert (error.field, error.metadata["limit"]) == ("queries[2].settings.max_pixels", "100000")
    assert POLICY.resolve(RequestedSettings(max_pixels=100_000)).max_pixels == 100_000


# I16
def test_a_small_picture_can_not_be_blown_up_within_the_hubs_own_budget() -> None:
    error = refusal(RequestedSettings(min_pixels=9_000_000, max_pixels=10_000_000), of_server())
    assert error.field == "settings.min_pixels"


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["min_pixels", "max_pixels"])
def test_budgets_are_above_zero(name: str, value: int) -> None:
    wish = (
        RequestedSettings(min_pixels=value) if name == "min_pixels" else RequestedSettings(max_pixels=value)
    )
    assert refusal(wish).field == f"settings.{name}"


@pytest.mark.parametrize(
    "wish",
    [RequestedSettings(total_pixels=5), RequestedSettings(fps=1.0), RequestedSettings(num_frames=4)],
)
def test_settings_of_clips_are_refused(wish: RequestedSettings) -> None:
    assert "clips" in refusal(wish).message


def test_without_a_resize_there_are_no_budgets() -> None:
    assert POLICY.resolve(RequestedSettings(do_resize=False)) == EffectiveSettings(do_resize=False)
    assert refusal(RequestedSettings(do_resize=False, max_pixels=5000)).field == "settings.max_pixels"


def test_the_servers_defaults_are_the_checkpoints_own() -> None:
    assert of_server() == PixelPolicy(65_536, 16_777_216, 1_048_576, 16_777_216)


def test_an_operator_may_lower_and_raise_them() -> None:
    lowered = of_server(limit_max_pixels=500_000)
    assert (lowered.default_max_pixels, lowered.limit_max_pixels) == (500_000, 500_000)
    raised = of_server(default_max_pixels=20_000_000)
    assert (raised.default_max_pixels, raised.limit_max_pixels) == (20_000_000, 20_000_000)


def test_defaults_that_contradict_the_limit_are_refused() -> None:
    with pytest.raises(InvalidMediaSettings):
        of_server(default_max_pixels=600_000, limit_max_pixels=500_000)
    with pytest.raises(InvalidMediaSettings):
        of_server(default_max_pixels=60_000)
