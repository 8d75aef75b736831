"""The names under which the parts of a record stand in a store.

All parts of a record share the braces, the hash tag of Redis Cluster, and so live on one shard.
"""

from shared.features.key import FeatureKey
from shared.features.manifest import Manifest


def manifest_name(key: FeatureKey) -> str:
    """The name of the manifest: there is a feature where it stands."""
    return f"lenspair:{{{key}}}:m"


def chunk_names(manifest: Manifest) -> list[str]:
    """The names of the chunks of one write, in their order."""
    prefix = f"lenspair:{{{manifest.key}}}:c:{manifest.write_id}"
    return [f"{prefix}:{index}" for index in range(len(manifest.chunk_checksums))]
