"""The composition root: the only place that knows which concrete parts a decoder is made of."""

import asyncio
from functools import partial

import structlog
import torch
from transformers.utils.logging import disable_progress_bar

from decoder_service.allowed_sources import AllowedSources
from decoder_service.byte_budget import ByteBudget
from decoder_service.engine.engine import GenerationRequest, Limits, NoTensors, Prompt, Sampling
from decoder_service.engine.kv_cache import BLOCK_TOKENS, BlockManager
from decoder_service.engine.kv_pool import KVPool
from decoder_service.engine.language_model import LanguageModel, open_language_model
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.model_runner import ModelRunner
from decoder_service.engine.scheduler import BatchLimits, Chunk, Scheduler, Step
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.grammars import Grammars
from decoder_service.hand_over import HandedOverFeatures
from decoder_service.mode_file import ModeFile
from decoder_service.prompt import PromptBuilder
from decoder_service.service import DecoderService
from decoder_service.servicer import DecoderServicer
from decoder_service.settings import DecoderSettings
from decoder_service.task import TaskLimits
from shared.checkpoint import choose_placement, open_checkpoint
from shared.cpu import available_cores
from shared.features.codec import FeatureCodec
from shared.features.source import SourceSeal
from shared.pb.lenspair.decoder.v1 import decoder_pb2, decoder_pb2_grpc
from shared.rpc.feature_source import FeatureCalls
from shared.rpc.process import run_process
from shared.store.open_store import open_codec, open_store
from shared.store.process_cache import CachedFeatureStore
from shared.store.store import FeatureStore

SERVICE_NAME = decoder_pb2.DESCRIPTOR.services_by_name["DecoderService"].full_name

# Less would not hold the smallest picture and an answer.
_SMALLEST_CONTEXT = 256

_log = structlog.get_logger("lenspair.decoder")


class Decoder:
    """A decoder with its language model loaded and run once."""

    def __init__(
        self,
        engine: EngineLoop,
        store: FeatureStore,
        calls: FeatureCalls,
        grammars: Grammars,
        mode_file: ModeFile | None,
    ) -> None:
        self.store = store
        self._engine = engine
        self._calls = calls
        self._grammars = grammars
        self._mode_file = mode_file

    async def run(self) -> None:
        watching = asyncio.create_task(self._mode_file.run()) if self._mode_file else None
        try:
            await self._engine.run()
        finally:
            if watching is not None:
                watching.cancel()

    async def close(self) -> None:
        await self._engine.close()
        self._grammars.close()
        await self._calls.close()
        await self.store.close()


def run(settings: DecoderSettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status of the process."""
    torch.set_num_threads(settings.torch_threads or available_cores())
    disable_progress_bar()  # a log has lines, no bars
    servicer = DecoderServicer()
    register = partial(decoder_pb2_grpc.add_DecoderServiceServicer_to_server, servicer)
    return run_process(settings, SERVICE_NAME, register, partial(build, settings, servicer))


def build(settings: DecoderSettings, servicer: DecoderServicer) -> Decoder:
    """Loads the model, runs it once, and puts the parts together behind the servicer."""
    checkpoint = open_checkpoint(settings.checkpoint)
    store = with_cache(open_store(settings, checkpoint.fingerprint), settings)
    placement = choose_placement(settings.device, settings.dtype, has_cuda=torch.cuda.is_available())
    model = open_language_model(
        checkpoint.path,
        dtype=getattr(torch, placement.dtype),
        device=torch.device(placement.device),
        rope_factor=settings.rope_scaling_factor,
    )
    _log.info("model loaded", fingerprint=checkpoint.fingerprint, device=placement.device)
    engine = build_engine(model, settings)
    shape = FeatureShape(checkpoint.fingerprint, model.hidden_size, model.deepstack_levels)
    calls = FeatureCalls()
    sources = handed_over_features(settings, open_codec(settings, checkpoint.fingerprint), calls)
    prompts = PromptBuilder.open(checkpoint)
    grammars = Grammars(prompts.tokenizer_json, vocab_size=model.vocab_size, end_ids=prompts.stop_token_ids)
    service = DecoderService(
        FeatureReader(store, shape, sources),
        prompts,
        engine,
        task_limits(settings, model.vocab_size),
        ByteBudget(settings.max_pending_feature_bytes, max_waiting=settings.max_waiting),
        grammars=grammars,
        model_name=checkpoint.path.name,
    )
    servicer.use(service)
    path = settings.mode_file
    mode_file = None if path is None else ModeFile(path, settings.mode, engine.use_mode)
    return Decoder(engine, store, calls, grammars, mode_file)


def handed_over_features(
    settings: DecoderSettings, codec: FeatureCodec, calls: FeatureCalls
) -> HandedOverFeatures | None:
    """None when no encoder may be asked."""
    allowed = AllowedSources.parse(settings.allowed_sources)
    if not allowed:
        return None
    assert settings.store_key_bytes is not None, "the settings were checked"
    seal = SourceSeal(settings.store_key_bytes)
    return HandedOverFeatures(codec, seal, allowed, calls, timeout_seconds=settings.store_timeout_seconds)


def with_cache(store: FeatureStore, settings: DecoderSettings) -> FeatureStore:
    """The store behind this process' cache, unless it is switched off."""
    if settings.feature_cache_bytes == 0:
        return store
    return CachedFeatureStore(
        store, max_bytes=settings.feature_cache_bytes, max_entries=settings.feature_cache_entries
    )


def build_engine(model: LanguageModel, settings: DecoderSettings) -> EngineLoop:
    num_blocks = model.kv_shape.blocks_within(settings.kv_cache_bytes)
    context = context_tokens(settings, model.context_tokens, num_blocks * BLOCK_TOKENS)
    pool = KVPool(model.kv_shape, num_blocks, model.device)
    limits = BatchLimits(
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_waiting=settings.max_waiting,
        min_batch_size=settings.min_batch_size,
        window_seconds=settings.batch_window_ms / 1000,
    )
    _log.info("cache made", tokens=num_blocks * BLOCK_TOKENS, mode=settings.mode)
    runner = ModelRunner(model, pool)
    _warm_up(runner)
    engine = EngineLoop(
        runner,
        Scheduler(BlockManager(num_blocks), limits),
        context_tokens=context,
    )
    engine.use_mode(settings.mode)
    return engine


def context_tokens(settings: DecoderSettings, own: int, in_cache: int) -> int:
    """Most tokens of a request: as the setting says, within what model and cache allow.

    Raises:
        ValueError: the setting asks for more than the model has, or the cache holds next to nothing.
    """
    if settings.max_context_tokens > own:
        raise ValueError(
            f"LENSPAIR_MAX_CONTEXT_TOKENS is {settings.max_context_tokens}, the model's context {own}; "
            "LENSPAIR_ROPE_SCALING_FACTOR stretches it"
        )
    wanted = settings.max_context_tokens or own
    if in_cache < min(wanted, _SMALLEST_CONTEXT):
        raise ValueError(f"LENSPAIR_KV_CACHE_BYTES holds {in_cache} tokens only; give it more")
    if in_cache < wanted:
        _log.warning("the cache is smaller than the context", context_tokens=wanted, cache_tokens=in_cache)
    return min(wanted, in_cache)


def _warm_up(runner: ModelRunner) -> None:
    """Runs one step, so that no caller pays for what is made on first use."""
    prompt = Prompt(token_ids=(0, 0), positions=((0, 0, 0), (1, 1, 1)), next_position=2)
    name = "warm-up"
    runner.open(GenerationRequest(name, prompt, NoTensors(), Sampling(), Limits(max_output_tokens=1)))
    first = Chunk(name, start=0, token_ids=(0, 0), row=0, samples=True, output_index=0, block_table=[0])
    runner.run(Step((first,)))
    runner.close(name)


def task_limits(settings: DecoderSettings, vocab_size: int) -> TaskLimits:
    return TaskLimits(
        max_output_tokens=settings.max_output_tokens,
        default_output_tokens=min(settings.default_output_tokens, settings.max_output_tokens),
        max_prompt_characters=settings.max_prompt_characters,
        vocab_size=vocab_size,
    )
