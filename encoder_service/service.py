"""The use case: make sure that a picture's features are in the store, and say where.

The key is found and looked up before a single pixel is decoded. What nobody has yet is computed once,
however many ask for it at the same time.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from encoder_service import metrics
from encoder_service.intake import Intake
from encoder_service.media_settings import PixelPolicy, RequestedSettings
from encoder_service.tally import Kind, TenantTally
from encoder_service.worker import Worker
from shared.batching import Claim
from shared.errors import DeadlineExceeded
from shared.features.key import EffectiveSettings, FeatureKey, Modality, media_digest
from shared.single_flight import SingleFlight, Work
from shared.store.store import FeatureStore, StoredFeature

# Below this, hashing takes less time than the way to another thread and back.
_HASH_INLINE_BYTES = 256 * 1024
_LOOKUPS_AT_ONCE = 16


class Outcome(IntEnum):
    """How a feature was found; the values of lenspair.encoder.v1.Outcome."""

    HIT = 1
    ENCODED = 2
    JOINED = 3


_KINDS: dict[Outcome, Kind] = {Outcome.HIT: "hit", Outcome.ENCODED: "encoded", Outcome.JOINED: "joined"}


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture to encode. `tenant` is a key part; `deadline` is on the clock of the service."""

    tenant: str
    data: bytes
    settings: RequestedSettings
    deadline: float


@dataclass(frozen=True, slots=True)
class PictureQuery:
    """A picture by the SHA-256 of its bytes."""

    tenant: str
    sha256: bytes
    settings: RequestedSettings


@dataclass(frozen=True, slots=True)
class Encoded:
    """Where the features are, how they were found, and the settings that they were made with."""

    feature: StoredFeature
    outcome: Outcome
    settings: EffectiveSettings


class EncoderService:
    """What the encoder does for its callers. `namespace` is the key part of model and processor.

    `tally` counts what each tenant was handed out.
    """

    def __init__(
        self,
        *,
        store: FeatureStore,
        intake: Intake,
        worker: Worker,
        policy: PixelPolicy,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._intake = intake
        self._worker = worker
        self._policy = policy
        self._namespace = namespace
        self._clock = clock
        self.tally = TenantTally()
        self._flights: SingleFlight[FeatureKey, tuple[StoredFeature, Outcome]] = SingleFlight()

    def deadline_in(self, seconds: float) -> float:
        """The point in time so many seconds from now, as `Picture.deadline` wants it."""
        return self._clock() + seconds

    def check_announced(self, size_bytes: int, settings: RequestedSettings) -> None:
        """Refuses a picture by what is declared of it, before its bytes are sent.

        Raises:
            MediaTooLarge: it is above the limit.
            InvalidMediaSettings: its settings can't be used.
        """
        self._intake.check_size(size_bytes)
        self._policy.resolve(settings)

    async def encode(self, picture: Picture) -> Encoded:
        """Finds the features of a picture, or computes and stores them.

        Raises:
            InvalidMedia, MediaTooLarge, InvalidMediaSettings: the picture or its settings can't be used.
            QueueFull: too much waits already.
            StoreUnavailable, StoreFull: the store does not answer, or takes no more.
            DeadlineExceeded: the deadline has passed.
        """
        self._intake.check_size(len(picture.data))
        settings = self._policy.resolve(picture.settings)
        metrics.MEDIA_BYTES.observe(len(picture.data))
        with metrics.stage("digest"):
            sha256 = await _sha256(picture.data)
        key = self._key(picture.tenant, sha256, settings)

        async def work(claim: Claim) -> tuple[StoredFeature, Outcome]:
            return await self._find_or_make(key, picture.data, settings, claim)

        feature, outcome = await self._fly(key, picture.deadline, work)
        metrics.count_feature(outcome.name.lower(), feature.manifest.token_count)
        self.tally.count(picture.tenant, _KINDS[outcome])
        return Encoded(feature, outcome, settings)

    async def look_up(self, queries: Sequence[PictureQuery]) -> list[StoredFeature | None]:
        """What the store has of these pictures, in their order; computes nothing.

        Raises:
            InvalidMediaSettings: the settings of a query can't be used.
            StoreUnavailable: the store does not answer.
        """
        keys = [
            self._key(query.tenant, query.sha256, self._policy.resolve(query.settings)) for query in queries
        ]
        some_at_once = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

        async def find(key: FeatureKey) -> StoredFeature | None:
            async with some_at_once:
                return await self._store.look_up(key)

        with metrics.stage("lookup"):
            found = await asyncio.gather(*(find(key) for key in keys))
        for key, feature in zip(keys, found, strict=True):
            self.tally.count(key.tenant, "missed" if feature is None else "hit")
        return found

    async def close(self) -> None:
        """Ends what is still being computed. No call may follow."""
        await self._flights.close()

    async def _fly(
        self, key: FeatureKey, deadline: float, work: Work[tuple[StoredFeature, Outcome]]
    ) -> tuple[StoredFeature, Outcome]:
        timeout = asyncio.timeout(max(0.0, deadline - self._clock()))
        try:
            async with timeout:
                (feature, outcome), is_leader = await self._flights.run(key, deadline, work)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the picture was not encoded in time") from None
        if outcome is Outcome.ENCODED and not is_leader:
            outcome = Outcome.JOINED
        return feature, outcome

    async def _find_or_make(
        self, key: FeatureKey, data: bytes, settings: EffectiveSettings, claim: Claim
    ) -> tuple[StoredFeature, Outcome]:
        with metrics.stage("lookup"):
            found = await self._store.look_up(key)
        if found is not None:
            return found, Outcome.HIT
        num_patches = await self._intake.count_patches(data, settings)
        with self._worker.place(num_patches):
            patches = await self._intake.patches(data, settings)
        bundle = await self._worker.encode(self._worker.submit(patches, claim))
        with metrics.stage("store"):
            return await self._store.put(key, bundle), Outcome.ENCODED

    def _key(self, tenant: str, sha256: bytes, settings: EffectiveSettings) -> FeatureKey:
        return FeatureKey(tenant, self._namespace, media_digest(Modality.IMAGE, sha256, settings))


async def _sha256(data: bytes) -> bytes:
    if len(data) <= _HASH_INLINE_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
