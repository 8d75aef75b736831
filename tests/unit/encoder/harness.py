"""An encoder of real parts around a fake tower and a store in memory."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from demo.pair import DEMO_CHECKPOINT
from encoder_service.clip import ClipLimits
from encoder_service.clip_preprocess import ClipPreprocessor
from encoder_service.clip_settings import ClipPolicy
from encoder_service.decoders import Decoders
from encoder_service.hand_over import HandOver, HandOverMemory
from encoder_service.intake import Content, Intake
from encoder_service.leading import Leading
from encoder_service.media import MediaLimits
from encoder_service.media_jobs import DecoderLimits
from encoder_service.media_settings import PixelPolicy, RequestedSettings
from encoder_service.policies import Policies
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import EncoderService, Medium
from encoder_service.stored_features import StoredFeatures
from encoder_service.worker import Worker
from shared.batching import BatchLimits
from shared.features.codec import FeatureCodec
from shared.features.key import Modality, namespace, tenant_tag
from shared.store.leases import FeatureLeases
from shared.store.memory import MemoryFeatureStore, MemoryValue
from shared.store.memory_leases import MemoryFeatureLeases
from shared.store.store import FeatureStore
from tests.fakes import FakeTower
from tests.unit.encoder.samples import LIMITS

POLICY = PixelPolicy(
    default_min_pixels=4096, default_max_pixels=65_536, limit_min_pixels=65_536, limit_max_pixels=65_536
)
CLIP_POLICY = ClipPolicy(
    default_min_pixels=4096,
    default_max_pixels=65_536,
    limit_max_pixels=65_536,
    default_total_pixels=262_144,
    limit_total_pixels=1_048_576,
    default_fps=2.0,
    min_frames=4,
    max_frames=64,
    factor=32,
)
CLIP_LIMITS = ClipLimits(max_pixels=64_000_000, max_side=32_768, max_seconds=600, max_frames=10_000)
TENANT = tenant_tag("")
FINGERPRINT = "0" * 64
MAX_KEEP_ALIVE_SECONDS = 3600


@cache
def demo_clips() -> ClipPreprocessor:
    return ClipPreprocessor.open(DEMO_CHECKPOINT)


@dataclass(frozen=True, slots=True)
class Harness:
    service: EncoderService
    stored: StoredFeatures
    store: Any  # a MemoryFeatureStore, unless the test brings another one
    tower: FakeTower
    intake: Intake
    hand_over: HandOver


def a_store(values: dict[str, MemoryValue] | None = None) -> MemoryFeatureStore:
    codec = FeatureCodec(fingerprint=FINGERPRINT, chunk_bytes=4096)
    return MemoryFeatureStore(codec, ttl_seconds=60, values=values)


def no_hand_over() -> HandOver:
    """That of an encoder without an advertised address."""
    codec = FeatureCodec(fingerprint=FINGERPRINT, chunk_bytes=4096)
    return HandOver(codec, HandOverMemory(limit_bytes=1, seconds=1), None)


def picture(
    data: bytes, settings: RequestedSettings | None = None, *, tenant: str = TENANT, seconds: float = 20.0
) -> Medium:
    return medium(Content(Modality.IMAGE, data), settings, tenant=tenant, seconds=seconds)


def medium(
    content: Content,
    settings: RequestedSettings | None = None,
    *,
    tenant: str = TENANT,
    seconds: float = 20.0,
) -> Medium:
    return Medium(tenant, content, settings or RequestedSettings(), time.monotonic() + seconds)


@asynccontextmanager
async def an_encoder(
    preprocessor: ImagePreprocessor,
    *,
    store: FeatureStore | None = None,
    hand_over: HandOver | None = None,
    leases: FeatureLeases | None = None,
    model: str = "a model",
    max_queue_items: int = 64,
    max_batch_patches: int = 4096,
    limits: MediaLimits = LIMITS,
) -> AsyncIterator[Harness]:
    tower = FakeTower()
    worker = Worker(tower, BatchLimits(16, max_batch_patches, max_queue_items, 65_536, window_seconds=0.002))
    decoders = Decoders(
        DecoderLimits(limits, CLIP_LIMITS), num_processes=2, max_bytes=1 << 30, timeout_seconds=20
    )
    intake = Intake(
        preprocessor,
        demo_clips(),
        CLIP_POLICY,
        decoders,
        limits,
        limit_pixels=POLICY.limit_max_pixels,
    )
    store = store or a_store()
    hand_over = hand_over or no_hand_over()
    service = EncoderService(
        store=store,
        intake=intake,
        worker=worker,
        policies=Policies(POLICY, CLIP_POLICY),
        namespace=namespace([("model", model)]),
        hand_over=hand_over,
        leading=Leading(leases or MemoryFeatureLeases()),
    )
    stored = StoredFeatures(
        store=store,
        hand_over=hand_over,
        tally=service.tally,
        max_keep_alive_seconds=MAX_KEEP_ALIVE_SECONDS,
    )
    loop = asyncio.create_task(worker.run())
    try:
        yield Harness(service, stored, store, tower, intake, hand_over)
    finally:
        tower.gate.set()
        await service.close()
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        worker.close()
        intake.close()
