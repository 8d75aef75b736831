"""An isolated process that decodes media: whatever a codec does to it, the encoder goes on.

See shared/isolation. It imports neither torch nor a model; its answers are headers, and pixels of the size
that it is told.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image

from encoder_service import media
from encoder_service.clip import Frames, decode_clip, read_clip_header
from encoder_service.media_jobs import DecoderLimits, pack, pack_frames, unpack, unpack_plan
from shared.errors import InvalidMedia, InvalidRequest
from shared.isolation.child import Handler, serve

_OTHER_SIZE = "the frame does not have the size of the first one"


def main() -> None:
    media.load_codecs()
    serve(_open)


def _open(setup: bytearray) -> Handler:
    decoder = _Decoder(DecoderLimits.unpack(setup))
    jobs: dict[str, Callable[[Mapping[str, Any], memoryview], bytes]] = {
        "picture_header": decoder.picture_header,
        "picture": decoder.picture,
        "clip_header": decoder.clip_header,
        "clip": decoder.clip,
        "frames": decoder.frames,
    }

    def handle(job: bytearray) -> bytes:
        said, data = unpack(job)
        return jobs[said["do"]](said, data)

    return handle


class _Decoder:
    """One method for each job. The errors are those of `media` and `clip`."""

    def __init__(self, limits: DecoderLimits) -> None:
        self._limits = limits

    def picture_header(self, said: Mapping[str, Any], data: memoryview) -> bytes:
        return pack(asdict(media.read_header(bytes(data), self._limits.media)))

    def picture(self, said: Mapping[str, Any], data: memoryview) -> bytes:
        pixels = self._resized(bytes(data), said["header"], said["size"])
        return pack_frames(Frames(pixels[None], (0.0,)))

    def clip_header(self, said: Mapping[str, Any], data: memoryview) -> bytes:
        return pack(asdict(read_clip_header(data, self._limits.clip)))

    def clip(self, said: Mapping[str, Any], data: memoryview) -> bytes:
        plan = unpack_plan(said["plan"])
        return pack_frames(decode_clip(data, self._limits.clip, plan.sampling, plan.size, plan.times))

    def frames(self, said: Mapping[str, Any], data: memoryview) -> bytes:
        """Encoded pictures of one size, as they follow one another."""
        frames, begin = [], 0
        for number, size_bytes in zip(said["numbers"], said["sizes"], strict=True):
            file = bytes(data[begin : begin + size_bytes])
            try:
                frames.append(self._resized(file, said["header"], said["size"]))
                if frames[-1].shape != frames[0].shape:
                    raise InvalidMedia(_OTHER_SIZE)
            except InvalidRequest as error:
                error.field = f"media.frames[{number}]"
                raise
            begin += size_bytes
        return pack_frames(Frames(np.stack(frames), tuple(said["times"])))

    def _resized(self, data: bytes, header: tuple[int, int], size: tuple[int, int]) -> Any:
        """A picture in the size found for the sides in its header, which its orientation may swap."""
        image = media.decode(data, self._limits.media)
        if sorted(image.size) != sorted(header):
            raise InvalidMedia(_OTHER_SIZE)
        if list(image.size) != list(header):
            size = (size[1], size[0])
        if image.size != tuple(size):
            image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
        return np.asarray(image)


if __name__ == "__main__":
    main()
