"""The isolated decoders of one encoder, as calls; knows neither codecs nor models.

A file that ends its process, or takes more time or memory than it may, is one that can't be used: nothing
else happens.
"""

from collections.abc import Sequence
from typing import Any

from encoder_service import media_jobs
from encoder_service.clip import ClipHeader, Frames
from encoder_service.media import FIELD, PictureHeader
from encoder_service.media_jobs import Bytes, ClipPlan, DecoderLimits
from shared.errors import InvalidMedia
from shared.isolation.workers import IsolatedWorkers, WorkerLost

Size = tuple[int, int]


class Decoders:
    """`num_processes` decoders. The errors are those of `media` and `clip`. Close them in the end."""

    def __init__(
        self, limits: DecoderLimits, *, num_processes: int, max_bytes: int, timeout_seconds: int
    ) -> None:
        self._workers = IsolatedWorkers(
            "encoder_service.media_worker",
            limits.pack(),
            num_processes=num_processes,
            max_bytes=max_bytes,
            max_result_bytes=max_bytes,
            timeout_seconds=timeout_seconds,
        )

    async def picture_header(self, data: Bytes) -> PictureHeader:
        said, _ = media_jobs.unpack(await self._run({"do": "picture_header"}, data))
        return media_jobs.picture_header(said)

    async def picture(self, data: Bytes, header: PictureHeader, size: Size) -> Frames:
        """One frame, of the size that was found for the header's."""
        job = {"do": "picture", "header": (header.width, header.height), "size": size}
        return media_jobs.unpack_frames(await self._run(job, data))

    async def clip_header(self, data: Bytes) -> ClipHeader:
        said, _ = media_jobs.unpack(await self._run({"do": "clip_header"}, data))
        return media_jobs.clip_header(said)

    async def clip(self, data: Bytes, plan: ClipPlan) -> Frames:
        job = {"do": "clip", "plan": media_jobs.pack_plan(plan)}
        return media_jobs.unpack_frames(await self._run(job, data))

    async def frames(
        self,
        files: Sequence[bytes],
        numbers: Sequence[int],
        times: Sequence[float],
        header: PictureHeader,
        size: Size,
    ) -> Frames:
        """A clip of encoded pictures, the first of which has the header; errors name them by `numbers`."""
        job = {
            "do": "frames",
            "sizes": [len(file) for file in files],
            "numbers": numbers,
            "times": times,
            "header": (header.width, header.height),
            "size": size,
        }
        return media_jobs.unpack_frames(await self._run(job, *files))

    def close(self) -> None:
        self._workers.close()

    async def _run(self, said: dict[str, Any], *files: Bytes) -> bytearray:
        try:
            return await self._workers.run(media_jobs.pack(said, *files))
        except WorkerLost:
            raise InvalidMedia("the media could not be decoded within the limits", field=FIELD) from None
