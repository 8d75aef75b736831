"""The composition root: the only place that knows which concrete parts an encoder is made of."""

import asyncio
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from PIL import Image

from encoder_service.hand_over import HandOver, HandOverMemory
from encoder_service.intake import Intake
from encoder_service.leading import Leading
from encoder_service.media import MediaLimits, load_codecs
from encoder_service.media_settings import PixelPolicy, RequestedSettings
from encoder_service.preprocess import ImagePreprocessor
from encoder_service.service import EncoderService
from encoder_service.servicer import EncoderServicer
from encoder_service.settings import EncoderSettings
from encoder_service.stored_features import StoredFeatures
from encoder_service.vision_model import VisionModel
from encoder_service.worker import Worker
from shared.batching import BatchLimits
from shared.checkpoint import choose_placement, open_checkpoint
from shared.cpu import available_cores
from shared.features.codec import FeatureCodec
from shared.features.key import namespace
from shared.features.manifest import stored_dtype
from shared.features.source import Address, SourceSeal
from shared.pb.lenspair.encoder.v1 import encoder_pb2, encoder_pb2_grpc
from shared.rpc.process import run_process
from shared.store.leases import FeatureLeases
from shared.store.open_store import open_codec, open_feature_leases, open_store
from shared.store.store import FeatureStore

SERVICE_NAME = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name

_log = structlog.get_logger("lenspair.encoder")


@dataclass(frozen=True, slots=True)
class Encoder:
    """The parts that run."""

    service: EncoderService
    worker: Worker
    intake: Intake
    store: FeatureStore
    leases: FeatureLeases

    async def run(self) -> None:
        """Serves the queue."""
        await self.worker.run()

    async def close(self) -> None:
        """Closes what works first, and what it works on last."""
        await self.service.close()
        await asyncio.to_thread(self.worker.close)
        await asyncio.to_thread(self.intake.close)
        await self.leases.close()
        await self.store.close()


def run(settings: EncoderSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status of the process."""
    torch.set_num_threads(settings.torch_threads or available_cores())
    servicer = EncoderServicer()
    register = partial(encoder_pb2_grpc.add_EncoderServiceServicer_to_server, servicer)
    return run_process(settings, SERVICE_NAME, register, partial(build, settings, servicer))


def build(settings: EncoderSettings, servicer: EncoderServicer) -> Encoder:
    """Loads the model, runs it once, and puts the parts together behind the servicer."""
    checkpoint = open_checkpoint(settings.checkpoint)
    store = open_store(settings, checkpoint.fingerprint)
    leases = open_feature_leases(settings, settings.lease_seconds)
    placement = choose_placement(settings.device, settings.dtype, has_cuda=torch.cuda.is_available())
    preprocessor = ImagePreprocessor.open(checkpoint.path)
    policy = pixel_policy(settings, preprocessor)
    model = VisionModel.open(checkpoint, placement)
    _warm_up(preprocessor, model, policy)
    _log.info("model loaded", fingerprint=checkpoint.fingerprint, device=placement.device)
    worker = Worker(model, batch_limits(settings))
    intake = Intake(
        preprocessor,
        media_limits(settings),
        limit_pixels=policy.limit_max_pixels,
        num_threads=settings.decode_threads,
    )
    fields = [("checkpoint", checkpoint.fingerprint), *preprocessor.namespace_fields()]
    offers = hand_over(settings, open_codec(settings, checkpoint.fingerprint))
    stored_as = stored_dtype(settings.store_dtype, placement.dtype)
    service = EncoderService(
        store=store,
        intake=intake,
        worker=worker,
        policy=policy,
        namespace=namespace([*fields, *model.namespace_fields(), ("stored_dtype", stored_as)]),
        hand_over=offers,
        leading=Leading(leases),
    )
    stored = StoredFeatures(
        store=store,
        hand_over=offers,
        tally=service.tally,
        max_keep_alive_seconds=settings.max_keep_alive_seconds,
    )
    servicer.use(service, stored)
    return Encoder(service, worker, intake, store, leases)


def hand_over(settings: EncoderSettings, codec: FeatureCodec) -> HandOver:
    memory = HandOverMemory(limit_bytes=settings.hand_over_bytes, seconds=settings.hand_over_seconds)
    if not settings.advertised_address:
        return HandOver(codec, memory, None)
    assert settings.store_key_bytes is not None, "the settings were checked"
    seal = SourceSeal(settings.store_key_bytes)
    return HandOver(codec, memory, partial(seal.close, Address.parse(settings.advertised_address)))


def pixel_policy(settings: EncoderSettings, preprocessor: ImagePreprocessor) -> PixelPolicy:
    return PixelPolicy.of_server(
        checkpoint_budget=preprocessor.pixel_budget,
        default_min_pixels=settings.default_min_pixels,
        default_max_pixels=settings.default_max_pixels,
        limit_min_pixels=settings.limit_min_pixels,
        limit_max_pixels=settings.limit_max_pixels,
    )


def media_limits(settings: EncoderSettings) -> MediaLimits:
    return MediaLimits(
        max_bytes=settings.max_media_bytes,
        max_pixels=settings.max_source_pixels,
        max_side=settings.max_source_side,
    )


def batch_limits(settings: EncoderSettings) -> BatchLimits:
    return BatchLimits(
        max_batch_items=settings.max_batch_items,
        max_batch_cost=settings.max_batch_patches,
        max_queue_items=settings.max_queue_items,
        max_queue_cost=settings.max_queue_patches,
        window_seconds=settings.batch_window_ms / 1000,
    )


def _warm_up(preprocessor: ImagePreprocessor, model: VisionModel, policy: PixelPolicy) -> None:
    """Sends one picture through, so that no caller pays for what is made on first use."""
    load_codecs()
    picture = Image.new("RGB", (64, 64))
    model.encode([preprocessor.patches(picture, policy.resolve(RequestedSettings()))])
