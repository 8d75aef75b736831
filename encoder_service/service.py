"""The use case: make sure that the features of a picture or clip are in the store, and say where.

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
from encoder_service.intake import Content, Intake
from encoder_service.leading import Leading, Turn
from encoder_service.media_settings import RequestedSettings
from encoder_service.policies import Policies
from encoder_service.sampling import patch_times
from encoder_service.tally import Kind, TenantTally
from encoder_service.worker import Worker
from shared.batching import Claim
from shared.errors import DeadlineExceeded, StoreFull, StoreUnavailable
from shared.features.bundle import FeatureBundle
from shared.features.key import EffectiveSettings, FeatureKey, Modality, frames_digest, media_digest
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
class Medium:
    """One picture or clip to encode. `tenant` is a key part; `deadline` is on the clock of the service.

    `allow_hand_over`: the caller takes a source in place of a stored feature.
    """

    tenant: str
    content: Content
    settings: RequestedSettings
    deadline: float
    allow_hand_over: bool = False


@dataclass(frozen=True, slots=True)
class Digests:
    """What identifies the content of a picture or clip: the SHA-256 of its file.

    Of a clip that is a list of frames, those of the frames, and their times in seconds.
    """

    modality: Modality
    sha256: bytes = b""
    frames: tuple[bytes, ...] = ()
    times: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MediumQuery:
    """A picture or clip by its digests."""

    tenant: str
    digests: Digests
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
        policies: Policies,
        namespace: str,
        hand_over: HandOver,
        leading: Leading,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._intake = intake
        self._worker = worker
        self._policies = policies
        self._namespace = namespace
        self._hand_over = hand_over
        self._leading = leading
        self._clock = clock
        self.tally = TenantTally()
        self._flights: SingleFlight[FeatureKey, _Found] = SingleFlight()

    def deadline_in(self, seconds: float) -> float:
        """The point in time so many seconds from now, as `Picture.deadline` wants it."""
        return self._clock() + seconds

    def check_announced(self, size_bytes: int, modality: Modality, settings: RequestedSettings) -> None:
        """Refuses a picture or clip by what is declared of it, before its bytes are sent.

        Raises:
            MediaTooLarge: it is above the limit.
            InvalidMediaSettings: its settings can't be used.
        """
        self._intake.check_size(size_bytes)
        self._policies.resolve(settings, modality, is_list=False)

    async def encode(self, medium: Medium) -> Encoded:
        """Finds the features of a picture or clip, or computes and stores them.

        Raises:
            InvalidMedia, MediaTooLarge, InvalidMediaSettings: the media or their settings can't be used.
            QueueFull: too much waits already.
            StoreUnavailable, StoreFull: the store does not answer, or takes no more, and the features can't
                be handed over.
            DeadlineExceeded: the deadline has passed.
        """
        content = medium.content
        self._intake.check_size(content.size_bytes)
        settings = self._policies.resolve(medium.settings, content.modality, is_list=bool(content.frames))
        metrics.MEDIA_BYTES.observe(content.size_bytes)
        with metrics.stage("digest"):
            digests = await _digests(content)
        key = self._key(medium.tenant, digests, settings)

        async def work(claim: Claim) -> _Found:
            return await self._find_or_make(key, content, settings, claim)

        with self._hand_over.allowed(key, by_caller=medium.allow_hand_over):
            found = await self._fly(key, medium.deadline, work)
        if found.problem is not None and not medium.allow_hand_over:
            raise found.problem
        metrics.count_feature(
            found.outcome.name.lower(), found.feature.manifest.token_count, is_offered=bool(found.source)
        )
        self.tally.count(medium.tenant, _KINDS[found.outcome])
        return Encoded(found.feature, found.outcome, settings, found.source)

    async def look_up(self, queries: Sequence[MediumQuery]) -> list[StoredFeature | None]:
        """What the store has of these media, in their order; computes nothing.

        Raises:
            InvalidMediaSettings: the settings of a query can't be used.
            StoreUnavailable: the store does not answer.
        """
        keys = [self._key_of(query) for query in queries]
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
        self, key: FeatureKey, content: Content, settings: EffectiveSettings, claim: Claim
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
            bundle = await self._make(content, settings, claim) if kept is None else kept
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

    async def _make(self, content: Content, settings: EffectiveSettings, claim: Claim) -> FeatureBundle:
        """A clip goes through the tower some temporal patches at a time, so that others get their turns."""
        survey = await self._intake.survey(content, settings)
        grid = survey.grid
        most = self._worker.max_batch_patches
        with self._worker.place(min(grid.t * grid.h * grid.w, most)):
            frames = await self._intake.decode(survey)
            first, *others = self._intake.slices(frames, most)
            patches = await self._intake.patches(first, content.modality)
        parts = [await self._worker.encode(self._worker.submit(patches, claim))]
        if content.modality is Modality.IMAGE:
            return parts[0]
        for each in others:
            patches = await self._intake.patches(each, content.modality)
            parts.append(await self._worker.encode(self._worker.submit(patches, claim)))
        return await asyncio.to_thread(FeatureBundle.of_clip, parts, patch_times(frames.times))

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

    def _key_of(self, query: MediumQuery) -> FeatureKey:
        digests = query.digests
        settings = self._policies.resolve(query.settings, digests.modality, is_list=bool(digests.frames))
        return self._key(query.tenant, digests, settings)

    def _key(self, tenant: str, digests: Digests, settings: EffectiveSettings) -> FeatureKey:
        if digests.frames:
            digest = frames_digest(digests.frames, digests.times, settings)
        else:
            digest = media_digest(digests.modality, digests.sha256, settings)
        return FeatureKey(tenant, self._namespace, digest)


async def _digests(content: Content) -> Digests:
    if content.size_bytes <= _HASH_INLINE_BYTES:
        return _digests_of(content)
    return await asyncio.to_thread(_digests_of, content)


def _digests_of(content: Content) -> Digests:
    if content.frames:
        frames = tuple(hashlib.sha256(frame).digest() for frame in content.frames)
        return Digests(content.modality, frames=frames, times=content.times)
    return Digests(content.modality, hashlib.sha256(content.data).digest())
