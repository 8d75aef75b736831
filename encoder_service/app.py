"""The composition root: the only place that knows which concrete parts an encoder is made of."""

import asyncio
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from PIL import Image

from encoder_service.clip import ClipLimits
from encoder_service.clip_preprocess import ClipPreprocessor
from encoder_service.clip_settings import ClipPolicy
from encoder_service.decoders import Decoders
from encoder_service.hand_over import HandOver, HandOverMemory
from encoder_service.intake import Intake
from encoder_service.leading import Leading
from encoder_service.media import MediaLimits
from encoder_service.media_jobs import DecoderLimits
from encoder_service.media_settings import PixelPolicy
from encoder_service.policies import Policies
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
    images, clips = ImagePreprocessor.open(checkpoint.path), ClipPreprocessor.open(checkpoint.path)
    policies = Policies(pixel_policy(settings, images), clip_policy(settings, images, clips))
    model = VisionModel.open(checkpoint, placement)
    _warm_up(images, model)
    _log.info("model loaded", fingerprint=checkpoint.fingerprint, device=placement.device)
    worker = Worker(model, batch_limits(settings))
    limits = decoder_limits(settings)
    decoders = Decoders(
        limits,
        num_processes=settings.decode_processes,
        max_bytes=settings.decode_bytes,
        timeout_seconds=settings.decode_seconds,
    )
    intake = Intake(
        images,
        clips,
        policies.clip,
        decoders,
        limits.media,
        limit_pixels=policies.picture.limit_max_pixels,
    )
    fields = [
        ("checkpoint", checkpoint.fingerprint),
        *images.namespace_fields(),
        *clips.namespace_fields(),
        *policies.clip.namespace_fields(),
    ]
    offers = hand_over(settings, open_codec(settings, checkpoint.fingerprint))
    stored_as = stored_dtype(settings.store_dtype, placement.dtype)
    service = EncoderService(
        store=store,
        intake=intake,
        worker=worker,
        policies=policies,
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


def clip_policy(settings: EncoderSettings, images: ImagePreprocessor, clips: ClipPreprocessor) -> ClipPolicy:
    low, total = clips.pixel_budget
    limit = settings.limit_max_pixels or images.pixel_budget[1]
    most_total = settings.limit_total_pixels or total
    min_frames, max_frames = clips.frame_limits
    return ClipPolicy(
        default_min_pixels=min(low, limit),
        default_max_pixels=min(clips.frame_tokens * clips.factor**2, limit),
        limit_max_pixels=limit,
        default_total_pixels=min(total, most_total),
        limit_total_pixels=most_total,
        default_fps=settings.default_fps,
        min_frames=min_frames,
        max_frames=min(max_frames, settings.max_clip_frames),
        factor=clips.factor,
    )


def decoder_limits(settings: EncoderSettings) -> DecoderLimits:
    return DecoderLimits(
        MediaLimits(
            max_bytes=settings.max_media_bytes,
            max_pixels=settings.max_source_pixels,
            max_side=settings.max_source_side,
        ),
        ClipLimits(
            max_pixels=settings.max_source_pixels,
            max_side=settings.max_source_side,
            max_seconds=settings.max_clip_seconds,
            max_frames=settings.max_clip_source_frames,
        ),
    )


def batch_limits(settings: EncoderSettings) -> BatchLimits:
    return BatchLimits(
        max_batch_items=settings.max_batch_items,
        max_batch_cost=settings.max_batch_patches,
        max_queue_items=settings.max_queue_items,
        max_queue_cost=settings.max_queue_patches,
        window_seconds=settings.batch_window_ms / 1000,
    )


def _warm_up(images: ImagePreprocessor, model: VisionModel) -> None:
    """Sends one picture through, so that no caller pays for what is made on first use."""
    model.encode([images.patches(Image.new("RGB", (64, 64)))])
