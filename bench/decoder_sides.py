"""The two sides of the decoder benchmark: our engine, and Transformers' `generate`, on the same features."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from decoder_service.engine.engine import GenerationRequest, Limits, RequestTimings, Sampling
from decoder_service.engine.kv_cache import BlockManager
from decoder_service.engine.kv_pool import KVPool
from decoder_service.engine.language_model import LanguageModel, open_language_model
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.model_runner import ModelRunner
from decoder_service.engine.scheduler import BatchLimits, Scheduler
from decoder_service.prompt import FeaturePart, PromptBuilder, TextPart, Turn
from shared.checkpoint import open_checkpoint
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality
from shared.features.manifest import Manifest

SIDE = 512
CACHE_BYTES = 1024**3
BATCH = BatchLimits(max_batch_size=16, max_batch_tokens=2048, max_waiting=1000)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: about which picture (by number), as which feature, and how many tokens to answer."""

    picture: int
    question: str
    output_tokens: int
    feature_id: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """What questions took, in seconds from their common start: each one's first token, and its end."""

    first_tokens: tuple[float, ...]
    ends: tuple[float, ...]
    tokens_after_prefill: int

    @property
    def prefill_seconds(self) -> float:
        """Until the last one has its first token."""
        return max(self.first_tokens)

    @property
    def decode_seconds(self) -> float:
        return max(self.ends) - self.prefill_seconds


def pictures(count: int) -> list[Image.Image]:
    """Coloured blocks, `SIDE` by `SIDE` pixels."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (count, SIDE // 32, SIDE // 32, 3), dtype=np.uint8)
    return [Image.fromarray(np.kron(each, np.ones((32, 32, 1), dtype=np.uint8))) for each in blocks]


class Transformers:
    """The whole model, whose tower makes the features for both sides; batches are padded on the left."""

    def __init__(self, checkpoint: Path, count: int) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self._processor.tokenizer.padding_side = "left"
        self._model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.eval()
        self._pictures = pictures(count)
        self._grid = Grid(*self._inputs([Ask(0, "", 1, b"")])["image_grid_thw"][0].tolist())
        self._features = [self._encode(number) for number in range(count)]

    def bundle(self, picture: int) -> FeatureBundle:
        main, *levels = self._features[picture]
        return FeatureBundle(
            modality=Modality.IMAGE,
            grid=self._grid,
            tensor=torch.cat([main, *levels], dim=1).contiguous(),
            hidden_size=main.shape[1],
            deepstack_levels=len(levels),
        )

    @torch.inference_mode()
    def seconds(self, asks: Sequence[Ask], output_tokens: int) -> float:
        """One static batch in which every answer has `output_tokens` tokens; features are given."""
        inputs = self._inputs(asks)
        features = [self._features[ask.picture] for ask in asks]
        encoded = BaseModelOutputWithDeepstackFeatures(
            pooler_output=tuple(each[0] for each in features),
            deepstack_features=[tuple(each[1:][n] for each in features) for n in range(len(features[0]) - 1)],
        )
        started = time.perf_counter()
        self._model.generate(
            **inputs,
            mm_encoder_outputs={"image": encoded},
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
        )
        return time.perf_counter() - started

    def prompt_tokens(self, asks: Sequence[Ask]) -> int:
        return int(self._inputs(asks)["attention_mask"].sum())

    def _inputs(self, asks: Sequence[Ask]) -> dict[str, Any]:
        texts = [
            self._processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ask.question}]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for ask in asks
        ]
        images = [self._pictures[ask.picture] for ask in asks]
        inputs = self._processor(
            text=texts, images=images, do_resize=False, padding=True, return_tensors="pt"
        )
        return {name: value for name, value in inputs.items() if name != "pixel_values"}

    @torch.inference_mode()
    def _encode(self, number: int) -> list[torch.Tensor]:
        inputs = self._processor(
            text=[""], images=[self._pictures[number]], do_resize=False, return_tensors="pt"
        )
        output = self._model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        [main] = output.pooler_output
        return [main, *(level for [level] in output.deepstack_features)]


class _Held:
    """Tensors that are at hand."""

    def __init__(self, bundle: FeatureBundle) -> None:
        self._bundle = bundle

    async def load(self, first: int) -> tuple[FeatureBundle, ...]:
        return (self._bundle,)[first:]

    def release(self) -> None:
        """They stay."""


class Engine:
    """Our engine as the service runs it, in this process."""

    def __init__(
        self, model: LanguageModel, prompts: PromptBuilder, bundles: Sequence[FeatureBundle]
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._bundles = bundles
        self._numbers = itertools.count()
        num_blocks = model.kv_shape.blocks_within(CACHE_BYTES)
        self._loop = EngineLoop(
            ModelRunner(model, KVPool(model.kv_shape, num_blocks, model.device)),
            Scheduler(BlockManager(num_blocks), BATCH),
            context_tokens=model.context_tokens,
        )

    @classmethod
    def open(cls, checkpoint: Path, bundles: Sequence[FeatureBundle]) -> Self:
        opened = open_checkpoint(str(checkpoint))
        model = open_language_model(opened.path, dtype=torch.float32, device=torch.device("cpu"))
        return cls(model, PromptBuilder.open(opened), bundles)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self._loop.run())
        yield
        await self._loop.close()
        await running

    async def run(self, asks: Sequence[Ask]) -> Run:
        """All questions at once."""
        requests = [self._request(ask) for ask in asks]
        started = time.perf_counter()
        times = await asyncio.gather(*(self._times(request, started) for request in requests))
        prefilled = max(each[0] for each in times)
        return Run(
            first_tokens=tuple(each[0] for each in times),
            ends=tuple(each[-1] for each in times),
            tokens_after_prefill=sum(moment > prefilled for each in times for moment in each),
        )

    @torch.inference_mode()
    def seconds_of_products(self, rows: int) -> float:
        """The matrix products of one step with `rows` rows alone: what no engine gets below."""
        started = time.perf_counter()
        self._model.multiply_all(rows)
        return time.perf_counter() - started

    async def _times(self, request: GenerationRequest, started: float) -> list[float]:
        """When each token came."""
        moments: list[float] = []
        async for outputs in self._loop.generate(request, RequestTimings()):
            moments += [time.perf_counter() - started] * len(outputs)
        return moments

    def _request(self, ask: Ask) -> GenerationRequest:
        bundle = self._bundles[ask.picture]
        turn = Turn("user", (FeaturePart("picture"), TextPart(ask.question)))
        return GenerationRequest(
            request_id=str(next(self._numbers)),
            prompt=self._prompts.build([turn], {"picture": _manifest(bundle)}),
            features=_Held(bundle),
            sampling=Sampling(),
            limits=Limits(ask.output_tokens),
            feature_ids=(ask.feature_id,),
        )


def _manifest(bundle: FeatureBundle) -> Manifest:
    return Manifest(
        key=FeatureKey("0" * 64, "1" * 64, "2" * 64),
        fingerprint="",
        modality=bundle.modality,
        grid=bundle.grid,
        token_count=bundle.token_count,
        hidden_size=bundle.hidden_size,
        deepstack_levels=bundle.deepstack_levels,
        dtype="float32",
        timestamps=(),
        chunk_bytes=1,
        size_bytes=bundle.size_bytes,
        chunk_checksums=(),
    )
