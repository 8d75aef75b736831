"""Media from bytes to patches, off the event loop, in a bounded number of threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from PIL import Image

from encoder_service import media, metrics
from encoder_service.media import MediaLimits, PictureHeader
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.tower import Patches
from shared.features.key import EffectiveSettings

T = TypeVar("T")


class Intake:
    """Decodes and preprocesses pictures. The errors are those of `media` and `preprocess`."""

    def __init__(
        self, preprocessor: ImagePreprocessor, limits: MediaLimits, *, limit_pixels: int, num_threads: int
    ) -> None:
        self._preprocessor = preprocessor
        self._limits = limits
        self._limit_pixels = limit_pixels
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        # Headers take microseconds; they must not queue behind pictures that are being decoded.
        self._headers = ThreadPoolExecutor(1, thread_name_prefix="header")

    def check_size(self, size_bytes: int) -> None:
        """Refuses media by their bytes alone, sent or only declared."""
        media.check_size(size_bytes, self._limits)

    async def count_patches(self, data: bytes, settings: EffectiveSettings) -> int:
        """How many patches a picture will have. Refuses all that its header allows to refuse."""
        header = await self._in(self._headers, media.read_header, data, self._limits)
        return self._count(header, settings)

    async def patches(self, data: bytes, settings: EffectiveSettings) -> Patches:
        """Decodes a picture and cuts it into patches."""
        with metrics.stage("decode"):
            image: Image.Image = await self._in(self._decoders, media.decode, data, self._limits)
        with metrics.stage("preprocess"):
            return await self._in(self._decoders, self._preprocessor.patches, image, settings)

    def close(self) -> None:
        for pool in (self._headers, self._decoders):
            pool.shutdown(wait=True, cancel_futures=True)

    def _count(self, header: PictureHeader, settings: EffectiveSettings) -> int:
        return self._preprocessor.count_patches(
            header.width, header.height, settings, limit_pixels=self._limit_pixels
        )

    async def _in(self, pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(call, *arguments))
