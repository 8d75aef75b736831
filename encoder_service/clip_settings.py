"""Which media settings a clip gets: its own wishes, the server's defaults, within the server's limits. Pure.

Pixels are counts after resizing: `min_pixels` and `max_pixels` of each frame, `total_pixels` of all frames
together. Nothing is clamped but the number of frames that `fps` asks for, which depends on the clip's length.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from encoder_service.media_settings import RequestedSettings, refusal
from encoder_service.sampling import Sampling
from shared.features.key import EffectiveSettings

MAX_FPS = 240.0


@dataclass(frozen=True, slots=True)
class ClipPolicy:
    """Defaults and limits. `factor` is the side of the square of pixels that becomes one visual token."""

    default_min_pixels: int
    default_max_pixels: int
    limit_max_pixels: int
    default_total_pixels: int
    limit_total_pixels: int
    default_fps: float
    min_frames: int
    max_frames: int
    factor: int

    def resolve(self, requested: RequestedSettings, *, is_list: bool) -> EffectiveSettings:
        """The settings that a clip is encoded with; a list of frames is taken whole unless it says otherwise.

        Raises:
            InvalidMediaSettings: naming the field and the values that do not go together.
        """
        self._check(requested)
        fps = requested.fps
        if fps is None and requested.num_frames is None and not is_list:
            fps = self.default_fps
        if requested.do_resize is False:
            return EffectiveSettings(do_resize=False, fps=fps, num_frames=requested.num_frames)
        settings = EffectiveSettings(
            do_resize=True,
            min_pixels=requested.min_pixels or min(self.default_min_pixels, requested.max_pixels or 1 << 62),
            max_pixels=requested.max_pixels or max(self.default_max_pixels, requested.min_pixels or 0),
            total_pixels=requested.total_pixels or self.default_total_pixels,
            fps=fps,
            num_frames=requested.num_frames,
        )
        self._check_together(settings, requested)
        return settings

    def sampling(self, settings: EffectiveSettings) -> Sampling:
        """How many frames of a clip are looked at: each of them takes one visual token at the least."""
        return Sampling(settings.fps, settings.num_frames, self.min_frames, self.most_frames(settings))

    def namespace_fields(self) -> Iterator[tuple[str, str]]:
        """What decides the frames of a clip beside its settings, for the namespace of keys."""
        yield "clip_frames", f"{self.min_frames} to {self.max_frames}"

    def most_frames(self, settings: EffectiveSettings) -> int:
        if settings.total_pixels is None:
            return self.max_frames
        return max(1, min(self.max_frames, settings.total_pixels // self.factor**2))

    def _check(self, requested: RequestedSettings) -> None:
        for name in ("min_pixels", "max_pixels", "total_pixels", "num_frames"):
            value = getattr(requested, name)
            if value is not None and value <= 0:
                raise refusal(requested, name, f"{name} must be above 0, not {value}")
            if value is not None and requested.do_resize is False and name != "num_frames":
                raise refusal(requested, name, f"{name} means nothing when do_resize is false")
        if requested.fps is not None and not 0 < requested.fps <= MAX_FPS:  # NaN is not
            raise refusal(requested, "fps", f"fps must be above 0 and at most {MAX_FPS:.0f}")
        if requested.fps is not None and requested.num_frames is not None:
            raise refusal(requested, "num_frames", "fps and num_frames exclude one another")
        for name, limit in (
            ("max_pixels", self.limit_max_pixels),
            ("min_pixels", self.limit_max_pixels),
            ("total_pixels", self.limit_total_pixels),
            ("num_frames", self.max_frames),
        ):
            value = getattr(requested, name)
            if value is not None and value > limit:
                message = f"{name} {value} is above the server's limit of {limit}"
                raise refusal(requested, name, message, limit=str(limit))

    def _check_together(self, settings: EffectiveSettings, requested: RequestedSettings) -> None:
        low, high = settings.min_pixels, settings.max_pixels
        assert low is not None
        assert high is not None
        if low > high:
            raise refusal(
                requested,
                "min_pixels",
                f"min_pixels {low} is above max_pixels {high}",
                min_pixels=str(low),
                max_pixels=str(high),
            )
        if settings.num_frames is not None and settings.num_frames > self.most_frames(settings):
            raise refusal(
                requested,
                "num_frames",
                f"num_frames {settings.num_frames} leaves less than one visual token for each frame "
                f"of total_pixels {settings.total_pixels}",
            )
