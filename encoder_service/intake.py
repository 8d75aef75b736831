"""Media from bytes to patches: decoded in isolated processes, cut into patches on threads."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from PIL import Image

from encoder_service import media, metrics
from encoder_service.clip import Frames
from encoder_service.clip_preprocess import ClipPreprocessor
from encoder_service.clip_settings import ClipPolicy
from encoder_service.decoders import Decoders
from encoder_service.media import MediaLimits
from encoder_service.media_jobs import ClipPlan
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.sampling import TEMPORAL_PATCH, choose_frames
from encoder_service.tower import Patches
from shared.errors import InvalidMedia, InvalidRequest, MediaTooLarge
from shared.features.grid import Grid
from shared.features.key import EffectiveSettings, Modality

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Content:
    """What is to be looked at: an encoded file, or a clip as encoded `frames` with their times in seconds."""

    modality: Modality
    data: bytes = b""
    frames: tuple[bytes, ...] = ()
    times: tuple[float, ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.data) + sum(map(len, self.frames))


@dataclass(frozen=True, slots=True)
class Survey:
    """What a header tells: the patch grid that there will be (at most), and how to get at the pixels."""

    grid: Grid
    decode: Callable[[], Awaitable[Frames]]


class Intake:
    """Decodes and preprocesses media. The errors are those of `media`, `clip` and the preprocessors."""

    def __init__(
        self,
        images: ImagePreprocessor,
        clips: ClipPreprocessor,
        policy: ClipPolicy,
        decoders: Decoders,
        limits: MediaLimits,
        *,
        limit_pixels: int,
    ) -> None:
        self._images = images
        self._clips = clips
        self._policy = policy
        self._decoders = decoders
        self._limits = limits
        self._limit_pixels = limit_pixels
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="patches")

    def check_size(self, size_bytes: int) -> None:
        """Refuses media by their bytes alone, sent or only declared."""
        media.check_size(size_bytes, self._limits)

    async def survey(self, content: Content, settings: EffectiveSettings) -> Survey:
        """Refuses all that headers allow to refuse; decodes nothing but a clip's first frame."""
        if content.modality is Modality.IMAGE:
            return await self._survey_picture(content.data, settings)
        if content.frames:
            return await self._survey_frames(content, settings)
        return await self._survey_clip(content.data, settings)

    async def decode(self, survey: Survey) -> Frames:
        """The pixels, in their final size."""
        with metrics.stage("decode"):
            return await survey.decode()

    async def patches(self, frames: Frames, modality: Modality) -> Patches:
        """The patches of a picture, or of frames of a clip."""
        with metrics.stage("preprocess"):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._patches, frames, modality)

    def slices(self, frames: Frames, most_patches: int) -> list[Frames]:
        """Frames of whole temporal patches, as many at a time as have no more patches than that."""
        height, width = frames.pixels.shape[1:3]
        grid = self._clips.grid((width, height), TEMPORAL_PATCH)
        step = TEMPORAL_PATCH * max(1, most_patches // (grid.h * grid.w))
        return [
            Frames(frames.pixels[begin : begin + step], frames.times[begin : begin + step])
            for begin in range(0, len(frames.times), step)
        ]

    def close(self) -> None:
        self._decoders.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _survey_picture(self, data: bytes, settings: EffectiveSettings) -> Survey:
        header = await self._decoders.picture_header(data)
        size = self._images.target_size(
            header.width, header.height, settings, limit_pixels=self._limit_pixels
        )
        return Survey(self._images.grid(size), lambda: self._decoders.picture(data, header, size))

    async def _survey_clip(self, data: bytes, settings: EffectiveSettings) -> Survey:
        header = await self._decoders.clip_header(data)
        sampling = self._policy.sampling(settings)
        count = len(choose_frames(header.times, sampling))
        size = self._clip_size(header.width, header.height, count, settings)
        plan = ClipPlan(sampling, size, header.times)
        return Survey(self._clips.grid(size, count), lambda: self._decoders.clip(data, plan))

    async def _survey_frames(self, content: Content, settings: EffectiveSettings) -> Survey:
        """The first frame's size is that of all."""
        chosen = choose_frames(content.times, self._policy.sampling(settings))
        most = self._policy.most_frames(settings)
        if len(chosen) > most:
            raise MediaTooLarge(
                f"{len(chosen)} frames are more than the limit of {most}",
                field="media.frames",
                limit="max_clip_frames",
                value=str(most),
            )
        try:
            header = await self._decoders.picture_header(content.frames[chosen[0]])
        except InvalidRequest as error:
            error.field = f"media.frames[{chosen[0]}]"
            raise
        size = self._clip_size(header.width, header.height, len(chosen), settings)
        files, times = _pick(content.frames, chosen), _pick(content.times, chosen)
        return Survey(
            self._clips.grid(size, len(chosen)),
            lambda: self._decoders.frames(files, chosen, times, header, size),
        )

    def _clip_size(self, width: int, height: int, count: int, settings: EffectiveSettings) -> tuple[int, int]:
        if not settings.do_resize:
            factor = self._clips.factor
            if width % factor or height % factor:
                raise InvalidMedia(
                    f"do_resize is false, but {width}x{height} are not multiples of {factor}",
                    field=media.FIELD,
                )
            most = min(self._policy.limit_max_pixels, self._policy.limit_total_pixels // count)
            if width * height > most:
                raise MediaTooLarge(
                    f"do_resize is false, and {count} frames of {width}x{height} are more than the limit "
                    f"of {most} pixels each",
                    field=media.FIELD,
                    limit="limit_total_pixels",
                    value=str(self._policy.limit_total_pixels),
                )
        return self._clips.target_size(width, height, count, settings)

    def _patches(self, frames: Frames, modality: Modality) -> Patches:
        if modality is Modality.IMAGE:
            return self._images.patches(Image.fromarray(frames.pixels[0]))
        return self._clips.patches(frames.pixels)


def _pick(things: Sequence[T], numbers: Sequence[int]) -> tuple[T, ...]:
    return tuple(things[number] for number in numbers)
