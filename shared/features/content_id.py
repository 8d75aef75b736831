"""What a stored feature's tensor is, by its content. Pure; knows no tensor.

Two manifests with the same id describe the same tensor of the same key: what was computed with the one holds
for the other. Who wrote the record, and when, is no part of it.
"""

import hashlib
import struct

from shared.features.manifest import Manifest


def content_id(manifest: Manifest) -> bytes:
    """32 bytes that are equal only for equal keys, layouts and values (SHA-256 over framed fields)."""
    grid = manifest.grid
    numbers = (grid.t, grid.h, grid.w, manifest.merge_size, manifest.token_count, manifest.hidden_size)
    sizes = (manifest.deepstack_levels, manifest.chunk_bytes, manifest.size_bytes)
    fields = (
        b"lenspair content",
        str(manifest.key).encode(),
        manifest.fingerprint.encode(),
        manifest.dtype.encode(),
        struct.pack(">9Q", *numbers, *sizes),
        *manifest.chunk_checksums,
    )
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.digest()
