"""The features that a question names: from key texts to manifests to tensors; knows no prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.errors import FeatureNotFound, FeatureRevisionMismatch
from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.store.store import FeatureStore


@dataclass(frozen=True, slots=True)
class NamedKey:
    """The text of a key and the request field that it stands in."""

    text: str
    field: str


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """What a language model needs of every feature that it is given."""

    fingerprint: str
    hidden_size: int
    deepstack_levels: int


class FeatureReader:
    """Reads manifests first and tensors later; both for all keys of a request together."""

    def __init__(self, store: FeatureStore, shape: FeatureShape) -> None:
        self._store = store
        self._shape = shape

    async def look_up(self, names: Sequence[NamedKey], tenant: str) -> dict[str, Manifest]:
        """The manifest of each key, by its text. Another tenant's key is answered like a missing one.

        Raises:
            MalformedFeatureKey: a text is no key.
            FeatureNotFound: listing every key that the store lacks.
            FeatureRevisionMismatch: a feature of another checkpoint.
            StoreUnavailable: the store does not answer.
        """
        keys = list(dict.fromkeys(FeatureKey.parse(name.text, field=name.field) for name in names))
        own = [key for key in keys if key.tenant == tenant]
        answers = await asyncio.gather(*(self._store.look_up(key) for key in own))
        found = {stored.manifest.key: stored.manifest for stored in answers if stored is not None}
        missing = [str(key) for key in keys if key not in found]
        if missing:
            raise FeatureNotFound(missing)
        for manifest in found.values():
            self._check(manifest)
        return {str(key): manifest for key, manifest in found.items()}

    async def fetch(self, manifests: Mapping[str, Manifest]) -> dict[str, FeatureBundle]:
        """The tensors of each manifest, by the key's text.

        Raises:
            FeatureNotFound: listing every key whose tensors are gone or damaged by now.
            StoreUnavailable: the store does not answer.
        """
        answers = await asyncio.gather(*(self._store.fetch(manifest) for manifest in manifests.values()))
        bundles = dict(zip(manifests, answers, strict=True))
        missing = [text for text, bundle in bundles.items() if bundle is None]
        if missing:
            raise FeatureNotFound(missing)
        return {text: bundle for text, bundle in bundles.items() if bundle is not None}

    def _check(self, manifest: Manifest) -> None:
        shape = FeatureShape(manifest.fingerprint, manifest.hidden_size, manifest.deepstack_levels)
        if shape != self._shape:
            raise FeatureRevisionMismatch(
                "made by another checkpoint than this decoder serves; encode it again with an encoder of "
                "the same checkpoint",
                field="task.turns.parts.feature_key",
                key=str(manifest.key),
            )
