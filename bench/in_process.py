"""The decoder's own parts over stores in memory, in this process; knows no questions and no true answers."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import torch
from tqdm import tqdm

from decoder_service.answer import Piece
from decoder_service.byte_budget import ByteBudget
from decoder_service.engine.kv_cache import BlockManager
from decoder_service.engine.kv_pool import KVPool
from decoder_service.engine.language_model import LanguageModel, open_language_model
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.model_runner import ModelRunner
from decoder_service.engine.scheduler import BatchLimits, Scheduler
from decoder_service.feature_reader import FeatureReader, FeatureShape
from decoder_service.grammars import Grammars
from decoder_service.prompt import FeaturePart, PromptBuilder, TextPart, Turn
from decoder_service.service import DecoderService
from decoder_service.task import Task, TaskLimits
from shared.checkpoint import Checkpoint
from shared.features.bundle import FeatureBundle
from shared.features.codec import FeatureCodec
from shared.features.key import FeatureKey, namespace, tenant_tag
from shared.features.manifest import StoreDtype
from shared.store.memory import MemoryFeatureStore

TENANT = tenant_tag("")
BATCH = BatchLimits(max_batch_size=32, max_batch_tokens=2048, max_waiting=100_000)
CACHE_BYTES = 256 * 1024**2
OUTPUT_TOKENS = 32
# All in memory at once: nothing may expire or wait for another.
TTL_SECONDS = 24 * 3600
CHUNK_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """(question, answer) pairs, of which the last question is asked, and what stands before the first."""

    turns: tuple[tuple[str, str], ...]
    pictures: tuple[FeatureBundle, ...]
    system: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """The texts of all answers, and all features as the decoder read them, in the order of asking."""

    texts: list[str]
    features: list[FeatureBundle]


class InProcessDecoder:
    """A decoder of one checkpoint in float32 on the CPU, greedy."""

    def __init__(self, model: LanguageModel, prompts: PromptBuilder, fingerprint: str) -> None:
        self._model = model
        self._prompts = prompts
        self._fingerprint = fingerprint

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> Self:
        model = open_language_model(checkpoint.path, dtype=torch.float32, device=torch.device("cpu"))
        prompts = PromptBuilder.open(checkpoint)
        return cls(model, prompts, checkpoint.fingerprint)

    async def answer_all(self, questions: Sequence[Question], store_dtype: StoreDtype) -> Answered:
        """Stores all features as `store_dtype`, reads them by key, and answers all questions together."""
        codec = FeatureCodec(fingerprint=self._fingerprint, chunk_bytes=CHUNK_BYTES, store_dtype=store_dtype)
        store = MemoryFeatureStore(codec, ttl_seconds=TTL_SECONDS)
        keys = [await _put(store, store_dtype, number, each) for number, each in enumerate(questions)]
        tasks = [_task(question, own) for question, own in zip(questions, keys, strict=True)]
        async with self._service(store) as service:
            texts = await _answer_all(service, tasks, f"answers from {store_dtype}")
        return Answered(texts, [await _read(store, key) for own in keys for key in own])

    @asynccontextmanager
    async def _service(self, store: MemoryFeatureStore) -> AsyncIterator[DecoderService]:
        model = self._model
        num_blocks = model.kv_shape.blocks_within(CACHE_BYTES)
        engine = EngineLoop(
            ModelRunner(model, KVPool(model.kv_shape, num_blocks, model.device)),
            Scheduler(BlockManager(num_blocks), BATCH),
            context_tokens=model.context_tokens,
        )
        grammars = Grammars(
            self._prompts.tokenizer_json,
            vocab_size=model.vocab_size,
            end_ids=self._prompts.stop_token_ids,
        )
        service = DecoderService(
            FeatureReader(store, FeatureShape(self._fingerprint, model.hidden_size, model.deepstack_levels)),
            self._prompts,
            engine,
            TaskLimits(
                OUTPUT_TOKENS, OUTPUT_TOKENS, max_prompt_characters=10_000, vocab_size=model.vocab_size
            ),
            ByteBudget(1024**3, max_waiting=BATCH.max_waiting),
            grammars=grammars,
            model_name="in process",
        )
        running = asyncio.create_task(engine.run())
        try:
            yield service
        finally:
            await engine.close()
            await running
            grammars.close()


async def _put(
    store: MemoryFeatureStore, store_dtype: StoreDtype, number: int, question: Question
) -> list[FeatureKey]:
    """Stores the pictures of question `number`; as in the service, each dtype has keys of its own."""
    space = namespace([("stored_dtype", store_dtype)])
    names = [f"{number}/{index}" for index in range(len(question.pictures))]
    keys = [FeatureKey(TENANT, space, hashlib.sha256(name.encode()).hexdigest()) for name in names]
    for key, bundle in zip(keys, question.pictures, strict=True):
        await store.put(key, bundle)
    return keys


async def _read(store: MemoryFeatureStore, key: FeatureKey) -> FeatureBundle:
    stored = await store.look_up(key)
    assert stored is not None
    bundle = await store.fetch(stored.manifest)
    assert bundle is not None
    return bundle


def _task(question: Question, keys: Sequence[FeatureKey]) -> Task:
    turns = [] if question.system is None else [Turn("system", (TextPart(question.system),))]
    pictures = tuple(FeaturePart(str(key)) for key in keys)
    for asked, answered in question.turns:
        turns.append(Turn("user", (*pictures, TextPart(asked))))
        turns.append(Turn("assistant", (TextPart(answered),)))
        pictures = ()
    return Task(turns=tuple(turns[:-1]))


async def _answer_all(service: DecoderService, tasks: Sequence[Task], title: str) -> list[str]:
    with tqdm(total=len(tasks), desc=title, leave=False, disable=None) as progress:

        async def ask(task: Task) -> str:
            pieces = [piece async for piece in service.answer(task, TENANT)]
            progress.update()
            return "".join(piece.text for piece in pieces if isinstance(piece, Piece))

        return await asyncio.gather(*(ask(task) for task in tasks))
