"""Fetched tensors count with the memory that they take, not with the bytes that the store holds."""

import asyncio

from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.prompt import FeaturePart, PromptBuilder, TextPart, Turn
from decoder_service.service import DecoderService
from decoder_service.task import Task, TaskLimits
from demo.pair import DEMO_CHECKPOINT
from shared.checkpoint import open_checkpoint
from shared.features.codec import FeatureCodec
from shared.store.memory import MemoryFeatureStore
from tests.decoder_fakes import ScriptedEngine, demo_grammars
from tests.feature_samples import HIDDEN_SIZE, LEVELS, make_bundle, make_key
from tests.rpc.servers import eventually

KEY = make_key()


async def test_fp8_is_held_as_the_bfloat16_that_it_becomes() -> None:
    codec = FeatureCodec(fingerprint="f" * 64, chunk_bytes=4096, store_dtype="fp8")
    store = MemoryFeatureStore(codec, ttl_seconds=60)
    manifest = (await store.put(KEY, make_bundle())).manifest
    budget, engine = ByteBudget(10**6, max_waiting=1), ScriptedEngine()
    service = DecoderService(
        FeatureReader(store, FeatureShape("f" * 64, HIDDEN_SIZE, LEVELS)),
        PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT))),
        engine,
        TaskLimits(
            max_output_tokens=64, default_output_tokens=16, max_prompt_characters=2000, vocab_size=960
        ),
        budget,
        grammars=demo_grammars(),
        model_name="scripted",
    )
    engine.script = (100,)
    engine.gate.clear()
    parts = (FeaturePart(str(KEY)), TextPart("What is this?"))
    answer = service.answer(Task(turns=(Turn("user", parts),)), KEY.tenant)
    first = asyncio.ensure_future(anext(answer))
    await eventually(lambda: bool(engine.features))
    assert budget.held == engine.features[0][0].size_bytes == 3072 > manifest.size_bytes
    engine.gate.set()
    await first
    assert budget.held == 0
    await answer.aclose()
