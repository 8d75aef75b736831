"""An encoder of real parts around a fake tower and a store in memory."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from encoder_service.hand_over import HandOver, HandOverMemory
from encoder_service.intake import Intake
from encoder_service.leading import Leading
from encoder_service.media import MediaLimits
from encoder_service.media_settings import PixelPolicy, RequestedSettings
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import EncoderService, Picture
from encoder_service.stored_features import StoredFeatures
from encoder_service.worker import Worker
from shared.batching import BatchLimits
from shared.features.codec import FeatureCodec
from shared.features.key import namespace, tenant_tag
from shared.store.leases import FeatureLeases
from shared.store.memory import MemoryFeatureStore, MemoryValue
from shared.store.memory_leases import MemoryFeatureLeases
from shared.store.store import FeatureStore
from tests.fakes import FakeTower
from tests.unit.encoder.samples import LIMITS

POLICY = PixelPolicy(
    default_min_pixels=4096, default_max_pixels=65_536, limit_min_pixels=65_536, limit_max_pixels=65_536
)
TENANT = tenant_tag("")
FINGERPRINT = "0" * 64
MAX_KEEP_ALIVE_SECONDS = 3600


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
) -> Picture:
    return Picture(tenant, data, settings or RequestedSettings(), time.monotonic() + seconds)


@asynccontextmanager
async def an_encoder(
    preprocessor: ImagePreprocessor,
    *,
    store: FeatureStore | None = None,
    hand_over: HandOver | None = None,
    leases: FeatureLeases | None = None,
    model: str = "a model",
    max_queue_items: int = 64,
    limits: MediaLimits = LIMITS,
) -> AsyncIterator[Harness]:
    tower = FakeTower()
    worker = Worker(tower, BatchLimits(16, 4096, max_queue_items, 65_536, window_seconds=0.002))
    intake = Intake(preprocessor, limits, limit_pixels=POLICY.limit_max_pixels, num_threads=2)
    store = store or a_store()
    hand_over = hand_over or no_hand_over()
    service = EncoderService(
        store=store,
        intake=intake,
        worker=worker,
        policy=POLICY,
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
