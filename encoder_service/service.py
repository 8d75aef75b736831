"""The use case: make sure that a picture's features are in the store, and say where.

The key is found and looked up before a single pixel is decoded. What nobody has yet is computed once,
however many ask for it at the same time.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

from encoder_service import metrics
from encoder_service.hand_over import HandOver, StoreProblem
from encoder_service.intake import Intake
from encoder_service.leading import Leading, Turn
from encoder_service.media_settings import PixelPolicy, RequestedSettings
from encoder_service.tally import Kind, TenantTally
from encoder_service.worker import Worker
from shared.batching import Claim
from shared.errors import DeadlineExceeded, StoreFull, StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.key import EffectiveSettings, FeatureKey, Modality, media_digest
from shared.for_each import for_each
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
    """One picture to encode. `tenant` is a key part; `deadline` is on the clock of the service.

    `allow_hand_over`: the caller takes a source in place of a stored feature.
    """

    tenant: str
    data: bytes
    settings: RequestedSettings
    deadline: float
    allow_hand_over: bool = False


@dataclass(frozen=True, slots=True)
class PictureQuery:
    """A picture by the SHA-256 of its bytes."""

    tenant: str
    sha256: bytes
    settings: RequestedSettings


@dataclass(frozen=True, slots=True)
class Encoded:
    """Where the features are, how they were found, and the settings that they were made with.

    `source` names this encoder when it hands the features over itself, because the store did not take them.
    """

    feature: StoredFeature
    outcome: Outcome
    settings: EffectiveSettings
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a flight comes to. With a source, `problem` is what callers get who take none."""

    feature: StoredFeature
    outcome: Outcome
    source: str = ""
    problem: StoreProblem | None = None


class EncoderService:
    """What the encoder does for its callers. `namespace` is the key part of model and processor.

    `hand_over` keeps what the store does not take; without it the store's errors are the callers'. `leading`
    sees to it that of all processes one computes a new picture. `tally` counts what each tenant was handed
    out.
    """

    def __init__(
        self,
        *,
        store: FeatureStore,
        intake: Intake,
        worker: Worker,
        policy: PixelPolicy,
        namespace: str,
        hand_over: HandOver,
        leading: Leading,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._intake = intake
        self._worker = worker
        self._policy = policy
        self._namespace = namespace
        self._hand_over = hand_over
        self._leading = leading
        self._clock = clock
        self.tally = TenantTally()
        self._flights: SingleFlight[FeatureKey, _Found] = SingleFlight()

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
            StoreUnavailable, StoreFull: the store does not answer, or takes no more, and the features can't
                be handed over.
            DeadlineExceeded: the deadline has passed.
        """
        self._intake.check_size(len(picture.data))
        settings = self._policy.resolve(picture.settings)
        metrics.MEDIA_BYTES.observe(len(picture.data))
        with metrics.stage("digest"):
            sha256 = await _sha256(picture.data)
        key = self._key(picture.tenant, sha256, settings)

        async def work(claim: Claim) -> _Found:
            return await self._find_or_make(key, picture.data, settings, claim)

        with self._hand_over.allowed(key, by_caller=picture.allow_hand_over):
            found = await self._fly(key, picture.deadline, work)
        if found.problem is not None and not picture.allow_hand_over:
            raise found.problem
        metrics.count_feature(
            found.outcome.name.lower(), found.feature.manifest.token_count, is_offered=bool(found.source)
        )
        self.tally.count(picture.tenant, _KINDS[found.outcome])
        return Encoded(found.feature, found.outcome, settings, found.source)

    async def look_up(self, queries: Sequence[PictureQuery]) -> list[StoredFeature | None]:
        """What the store has of these pictures, in their order; computes nothing.

        Raises:
            InvalidMediaSettings: the settings of a query can't be used.
            StoreUnavailable: the store does not answer.
        """
        keys = [
            self._key(query.tenant, query.sha256, self._policy.resolve(query.settings)) for query in queries
        ]
        with metrics.stage("lookup"):
            found = await for_each(keys, self._store.look_up, at_once=_LOOKUPS_AT_ONCE)
        for key, feature in zip(keys, found, strict=True):
            self.tally.count(key.tenant, "missed" if feature is None else "hit")
        return found

    @property
    def hand_over(self) -> HandOver:
        """What is kept for decoders."""
        return self._hand_over

    async def close(self) -> None:
        """Ends what is still being computed. No call may follow."""
        await self._flights.close()
        await self._leading.close()

    async def _fly(self, key: FeatureKey, deadline: float, work: Work[_Found]) -> _Found:
        timeout = asyncio.timeout(max(0.0, deadline - self._clock()))
        try:
            async with timeout:
                found, is_leader = await self._flights.run(key, deadline, work)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the picture was not encoded in time") from None
        if found.outcome is Outcome.ENCODED and not is_leader:
            return replace(found, outcome=Outcome.JOINED)
        return found

    async def _find_or_make(
        self, key: FeatureKey, data: bytes, settings: EffectiveSettings, claim: Claim
    ) -> _Found:
        async with self._leading.turn(key) as turn:
            problem: StoreProblem | None = None
            found = None
            try:
                found = await self._find(key, turn)
            except StoreUnavailable as error:
                self._hand_over.check_wanted(key, error)
                problem = error
            if found is not None:
                self._hand_over.forget(key)
                return found
            kept = self._hand_over.find(key)
            outcome = Outcome.ENCODED if kept is None else Outcome.HIT
            bundle = await self._make(data, settings, claim) if kept is None else kept
            return await self._store_or_offer(key, bundle, outcome, problem)

    async def _find(self, key: FeatureKey, turn: Turn) -> _Found | None:
        """What the store has, or gets from another process meanwhile; None: it is this one's to compute."""
        outcome, feature = Outcome.HIT, await self._look_up(key)
        if feature is None and self._hand_over.find(key) is None:
            outcome, feature = Outcome.JOINED, await turn.wait(partial(self._look_up, key))
        return None if feature is None else _Found(feature, outcome)

    async def _look_up(self, key: FeatureKey) -> StoredFeature | None:
        with metrics.stage("lookup"):
            return await self._store.look_up(key)

    async def _make(self, data: bytes, settings: EffectiveSettings, claim: Claim) -> FeatureBundle:
        num_patches = await self._intake.count_patches(data, settings)
        with self._worker.place(num_patches):
            patches = await self._intake.patches(data, settings)
        return await self._worker.encode(self._worker.submit(patches, claim))

    async def _store_or_offer(
        self, key: FeatureKey, bundle: FeatureBundle, outcome: Outcome, problem: StoreProblem | None
    ) -> _Found:
        """A store that did not answer when it was asked gets no second chance: it costs a time-out."""
        if problem is None:
            try:
                with metrics.stage("store"):
                    stored = await self._store.put(key, bundle)
                self._hand_over.forget(key)  # the store is the authority again
                return _Found(stored, outcome)
            except (StoreUnavailable, StoreFull) as error:
                problem = error
        feature, source = await self._hand_over.offer(key, bundle, problem)
        return _Found(feature, outcome, source, problem)

    def _key(self, tenant: str, sha256: bytes, settings: EffectiveSettings) -> FeatureKey:
        return FeatureKey(tenant, self._namespace, media_digest(Modality.IMAGE, sha256, settings))


async def _sha256(data: bytes) -> bytes:
    if len(data) <= _HASH_INLINE_BYTES:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
