"""The features that a question names: from key texts to manifests to tensors; knows no prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shared.errors import FeatureNotFound, FeatureRevisionMismatch, InvalidRequest, StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.for_each import for_each
from shared.store.store import FeatureStore

# One request may neither flood the store nor keep its connections from all others.
MAX_FEATURES: Final = 1024
_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True)
class NamedKey:
    """The text of a key, the request field that it stands in, and the source that stands beside it."""

    text: str
    field: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """What a language model needs of every feature that it is given."""

    fingerprint: str
    hidden_size: int
    deepstack_levels: int


class FeatureSource(Protocol):
    """Encoders that hand over what the store did not take.

    Every answer comes in bounded time, and is None where the feature can't be had or must not be used.
    `source` is what the caller said of the key's encoder; it may be anything.
    """

    async def manifest(self, key: FeatureKey, source: str) -> Manifest | None:
        """The checked manifest of the key."""

    async def bundle(self, manifest: Manifest, source: str) -> FeatureBundle | None:
        """The tensors of a manifest from `manifest`, all checksums and values verified."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where the tensor of a manifest is: in the store, or at a source because of the store's problem.

    A source without a problem: the store does not have the feature.
    """

    manifest: Manifest
    source: str = ""
    problem: StoreUnavailable | None = None


class FeatureReader:
    """Reads manifests first and tensors later; both for all keys of a request together.

    With `sources`, what the store can't give is asked of the encoder that the request names. That serves
    this one request: it never becomes part of the store or of a cache around it.
    """

    def __init__(
        self, store: FeatureStore, shape: FeatureShape, sources: FeatureSource | None = None
    ) -> None:
        self._store = store
        self._shape = shape
        self._sources = sources

    async def look_up(self, names: Sequence[NamedKey], tenant: str) -> dict[str, Location]:
        """The manifest of each key, by its text. Another tenant's key is answered like a missing one.

        Raises:
            InvalidRequest: there are more than MAX_FEATURES different keys.
            MalformedFeatureKey: a text is no key.
            FeatureNotFound: listing every key that can't be found.
            FeatureRevisionMismatch: a feature of another checkpoint.
            StoreUnavailable: the store does not answer.
        """
        sources: dict[FeatureKey, str] = {}
        for name in names:
            key = FeatureKey.parse(name.text, field=name.field)
            sources[key] = sources.get(key) or name.source
            if len(sources) > MAX_FEATURES:
                raise InvalidRequest(
                    f"at most {MAX_FEATURES} different features are allowed", field=name.field
                )
        own = [key for key in sources if key.tenant == tenant]
        answers = await for_each(own, lambda key: self._locate(key, sources[key]), at_once=_AT_ONCE)
        found = {location.manifest.key: location for location in answers if location is not None}
        missing = [str(key) for key in sources if key not in found]
        if missing:
            raise FeatureNotFound(missing)
        for location in found.values():
            self._check(location.manifest)
        return {str(key): location for key, location in found.items()}

    async def fetch(self, locations: Mapping[str, Location]) -> dict[str, FeatureBundle]:
        """The tensors of each key, by its text.

        Raises:
            FeatureNotFound: listing every key whose tensors are gone or damaged by now.
            StoreUnavailable: the store does not answer.
        """
        answers = await for_each(list(locations.values()), self._fetch, at_once=_AT_ONCE)
        bundles = dict(zip(locations, answers, strict=True))
        missing = [text for text, bundle in bundles.items() if bundle is None]
        if missing:
            raise FeatureNotFound(missing)
        return {text: bundle for text, bundle in bundles.items() if bundle is not None}

    async def _locate(self, key: FeatureKey, source: str) -> Location | None:
        problem = None
        try:
            stored = await self._store.look_up(key)
            if stored is not None:
                return Location(stored.manifest)
        except StoreUnavailable as error:
            problem = error
        if source and self._sources is not None:
            manifest = await self._sources.manifest(key, source)
            if manifest is not None:
                return Location(manifest, source, problem)
        if problem is not None:
            raise problem
        return None

    async def _fetch(self, location: Location) -> FeatureBundle | None:
        if not location.source:
            return await self._store.fetch(location.manifest)
        assert self._sources is not None, "only a source's manifest has a source"
        bundle = await self._sources.bundle(location.manifest, location.source)
        if bundle is None and location.problem is not None:
            raise location.problem
        return bundle

    def _check(self, manifest: Manifest) -> None:
        shape = FeatureShape(manifest.fingerprint, manifest.hidden_size, manifest.deepstack_levels)
        if shape != self._shape:
            raise FeatureRevisionMismatch(
                "made by another checkpoint than this decoder serves; encode it again with an encoder of "
                "the same checkpoint",
                field="task.turns.parts.feature_key",
                key=str(manifest.key),
            )
