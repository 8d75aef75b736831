"""The names under which the parts of a record stand in a store.

All parts of a record share the braces, the hash tag of Redis Cluster, and so live on one shard.
"""

import re
from typing import Final

from shared.errors import MalformedFeatureKey
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest

_MANIFEST_NAME: Final = re.compile(r"lenspair:\{([^{}]+)\}:m")


def manifest_name(key: FeatureKey) -> str:
    """The name of the manifest: there is a feature where it stands."""
    return f"lenspair:{{{key}}}:m"


def chunk_names(manifest: Manifest) -> list[str]:
    """The names of the chunks of one write, in their order."""
    return names_of_write(manifest.key, manifest.write_id, len(manifest.chunk_checksums))


def names_of_write(key: FeatureKey, write_id: str, num_chunks: int) -> list[str]:
    """The names of the chunks of a write that no manifest describes any more, or none yet."""
    prefix = f"lenspair:{{{key}}}:c:{write_id}"
    return [f"{prefix}:{index}" for index in range(num_chunks)]


def register_name(key: FeatureKey) -> str:
    """The name of the register of all writes of a key."""
    return f"lenspair:{{{key}}}:w"


def lease_name(key: FeatureKey) -> str:
    """The name of the lease of whoever computes the feature."""
    return f"lenspair:{{{key}}}:l"


def manifest_pattern(tenant: str) -> str:
    """What the names of all manifests of a tenant match; a tenant's key part holds no special character.

    Names of another length, which may be megabytes, do not match.
    """
    return f"lenspair:{{{tenant}.{'?' * 64}.{'?' * 64}}}:m"


def key_of_manifest(name: str) -> FeatureKey | None:
    """The key of a manifest's name; None for a name that is none of ours."""
    match = _MANIFEST_NAME.fullmatch(name)
    try:
        return None if match is None else FeatureKey.parse(match[1])
    except MalformedFeatureKey:
        return None
