"""Which media settings a request gets: its own wishes, the server's defaults, within the server's limits.

Nothing is clamped: a wish above a limit is refused, so that an answer never silently differs from what was
asked. Pure; knows neither gRPC nor the processor.
"""

from dataclasses import dataclass
from typing import Self

from shared.errors import InvalidMediaSettings
from shared.features.key import EffectiveSettings


@dataclass(frozen=True, slots=True)
class RequestedSettings:
    """The wishes of one request; None where it has none. `field` is where they stand in the request."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    do_resize: bool | None = None
    field: str = "settings"


@dataclass(frozen=True, slots=True)
class PixelPolicy:
    """Defaults and limits of the pixels of one picture after resizing."""

    default_min_pixels: int
    default_max_pixels: int
    limit_min_pixels: int
    limit_max_pixels: int

    def __post_init__(self) -> None:
        assert 0 < self.default_min_pixels <= self.default_max_pixels <= self.limit_max_pixels

    @classmethod
    def of_server(
        cls,
        *,
        checkpoint_budget: tuple[int, int],
        default_min_pixels: int | None,
        default_max_pixels: int | None,
        limit_min_pixels: int,
        limit_max_pixels: int | None,
    ) -> Self:
        """The operator's settings over those of the checkpoint; None takes the checkpoint's.

        Raises:
            InvalidMediaSettings: the defaults contradict one another or the limits.
        """
        low = default_min_pixels or checkpoint_budget[0]
        high = default_max_pixels or min(checkpoint_budget[1], limit_max_pixels or checkpoint_budget[1])
        limit = limit_max_pixels or max(high, checkpoint_budget[1])
        if not 0 < low <= high <= limit:
            raise InvalidMediaSettings(
                f"default min_pixels {low}, default max_pixels {high} and limit {limit} must be in this order"
            )
        return cls(low, high, limit_min_pixels, limit)

    def resolve(self, requested: RequestedSettings) -> EffectiveSettings:
        """The settings that a picture is encoded with.

        Raises:
            InvalidMediaSettings: naming the field and the values that do not go together.
        """
        _refuse_clip_settings(requested)
        _refuse_non_positive(requested)
        if requested.do_resize is False:
            _refuse_budgets(requested)
            return EffectiveSettings(do_resize=False)
        low = requested.min_pixels or self.default_min_pixels
        high = requested.max_pixels or self.default_max_pixels
        _refuse_reversed(low, high, requested)
        self._refuse_above_limits(requested)
        return EffectiveSettings(do_resize=True, min_pixels=low, max_pixels=high)

    def _refuse_above_limits(self, requested: RequestedSettings) -> None:
        for name, value, limit in (
            ("max_pixels", requested.max_pixels, self.limit_max_pixels),
            ("min_pixels", requested.min_pixels, self.limit_min_pixels),
        ):
            if value is not None and value > limit:
                message = f"{name} {value} is above the server's limit of {limit}"
                raise refusal(requested, name, message, limit=str(limit))


def _refuse_clip_settings(requested: RequestedSettings) -> None:
    for name in ("total_pixels", "fps", "num_frames"):
        if getattr(requested, name) is not None:
            raise refusal(requested, name, f"{name} is for clips, not for pictures")


def _refuse_non_positive(requested: RequestedSettings) -> None:
    for name in ("min_pixels", "max_pixels"):
        value = getattr(requested, name)
        if value is not None and value <= 0:
            raise refusal(requested, name, f"{name} must be above 0, not {value}")


def _refuse_budgets(requested: RequestedSettings) -> None:
    for name in ("min_pixels", "max_pixels"):
        if getattr(requested, name) is not None:
            raise refusal(requested, name, f"{name} means nothing when do_resize is false")


def _refuse_reversed(low: int, high: int, requested: RequestedSettings) -> None:
    if low <= high:
        return
    source = {True: "the server's default", False: "of the request"}
    raise refusal(
        requested,
        "max_pixels" if requested.min_pixels is None else "min_pixels",
        f"min_pixels {low} ({source[requested.min_pixels is None]}) is above "
        f"max_pixels {high} ({source[requested.max_pixels is None]})",
        min_pixels=str(low),
        max_pixels=str(high),
    )


def refusal(requested: RequestedSettings, name: str, message: str, **metadata: str) -> InvalidMediaSettings:
    """The error that names a setting of a request."""
    return InvalidMediaSettings(message, field=f"{requested.field}.{name}", **metadata)
