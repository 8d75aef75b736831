"""Encoded pictures for tests, made on the spot."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from encoder_service.media import MediaLimits
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.tower import Patches
from shared.features.key import EffectiveSettings

LIMITS = MediaLimits(max_bytes=8 * 1024 * 1024, max_pixels=64_000_000, max_side=32_768)


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def solid(colour: str | tuple[int, int, int], width: int = 64, height: int = 64) -> bytes:
    return encoded(Image.new("RGB", (width, height), colour))


def noise(width: int = 96, height: int = 64, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


def declared_png(width: int, height: int) -> bytes:
    """A small 1-bit PNG that is valid and as large as it says, all black."""
    row = b"\0" + bytes((width + 7) // 8)
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _png_chunk(*part) for part in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    )


def hub_like(directory: Path, **changes: Any) -> Path:
    """A directory with the processor settings of the real checkpoints."""
    config = {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    kept = {name: value for name, value in (config | changes).items() if value is not None}
    (directory / "preprocessor_config.json").write_text(json.dumps(kept))
    return directory


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def patches_of(preprocessor: ImagePreprocessor, image: Image.Image, settings: EffectiveSettings) -> Patches:
    """As the encoder makes them of a picture: resized once, where it is decoded, and cut."""
    size = preprocessor.target_size(*image.size, settings, limit_pixels=image.width * image.height)
    return preprocessor.patches(image.resize(size, Image.Resampling.BICUBIC))
