"""The unmodified Transformers model on pixels, and our engine on the features of its own tower."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from decoder_service.engine.engine import GenerationRequest, Limits, Prompt, Sampling, TokenOutput
from decoder_service.engine.kv_cache import BlockManager
from decoder_service.engine.kv_pool import KVPool
from decoder_service.engine.language_model import open_language_model, visual_token_ids
from decoder_service.engine.loop import EngineLoop
from decoder_service.engine.model_runner import ModelRunner
from decoder_service.engine.scheduler import BatchLimits, Scheduler
from decoder_service.prompt import FeaturePart, Part, PromptBuilder, TextPart, Turn
from shared.checkpoint import Checkpoint
from shared.features.bundle import FeatureBundle
from shared.features.grid import Grid
from shared.features.key import FeatureKey, Modality
from shared.features.manifest import Manifest
from tests.decoder_fakes import HeldTensors

OUTPUT_TOKENS = 16
TIE = 1e-5

SIZES = {"square": (64, 64), "wide": (64, 192), "tall": (160, 96), "large": (192, 192)}
CLIP_FPS = 2.0


def picture(name: str) -> Image.Image:
    """Coloured blocks; the same for the same name."""
    height, width = SIZES[name]
    rng = np.random.default_rng(sum(name.encode()))
    blocks = rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(blocks, np.ones((16, 16, 1), dtype=np.uint8)))


def clip() -> np.ndarray[Any, Any]:
    """Five frames, an odd number."""
    frames = np.random.default_rng(7).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    return np.kron(frames, np.ones((1, 16, 16, 1), dtype=np.uint8))


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about which media, by name; "clip" is the clip."""

    media: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference's answer: its tokens, a stop token at the end included, and the logits before each."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: torch.Tensor
    stops: frozenset[int]

    def is_met_by(self, outputs: Sequence[TokenOutput]) -> bool:
        """True for the same tokens, up to the first place where float32 can't tell the two best apart."""
        for place, (output, token_id) in enumerate(zip(outputs, self.tokens, strict=False)):
            ours_stops = output.token_id is None and token_id in self.stops
            if output.token_id != token_id and not ours_stops:
                return self._is_tie(place)
        return len(outputs) == len(self.tokens)

    def _is_tie(self, place: int) -> bool:
        logits = self.logits[place]
        best, second = logits.topk(2).values.tolist()
        return bool(best - second < TIE * logits.abs().max().item())


class Reference:
    """One checkpoint: asked as a whole, and taken apart into features and language half."""

    def __init__(self, checkpoint: Path, kind: str) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._builder = PromptBuilder.open(Checkpoint(checkpoint, kind, (), ""))
        self._bundles = {name: self._encode(name) for name in (*SIZES, "clip")}
        self.path = checkpoint

    def engine(
        self,
        *,
        size: int = 8,
        tokens: int = 1024,
        blocks: int = 300,
        dtype: torch.dtype = torch.float32,
    ) -> EngineLoop:
        model = open_language_model(self.path, dtype=dtype, device=torch.device("cpu"))
        pool = KVPool(model.kv_shape, blocks, model.device)
        scheduler = Scheduler(BlockManager(blocks), BatchLimits(size, tokens, max_waiting=100))
        return EngineLoop(ModelRunner(model, pool), scheduler, context_tokens=model.context_tokens)

    def request(
        self,
        request_id: str,
        question: Question,
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        continuation: tuple[int, ...] = (),
        bundles: tuple[FeatureBundle, ...] | None = None,
    ) -> GenerationRequest:
        """A greedy request of the engine, with the stop tokens of the checkpoint, unless told otherwise."""
        held = bundles or tuple(self._bundles[name] for name in question.media)
        return GenerationRequest(
            request_id=request_id,
            prompt=self.prompt(question),
            features=HeldTensors(*held),
            feature_ids=tuple(sha256(bundle.tensor.numpy().tobytes()).digest() for bundle in held),
            sampling=sampling or Sampling(),
            limits=limits or Limits(OUTPUT_TOKENS, stop_token_ids=self._builder.stop_token_ids),
            continuation=continuation,
        )

    def prompt(self, question: Question) -> Prompt:
        parts: list[Part] = [FeaturePart(name) for name in question.media]
        parts.append(TextPart(question.text))
        manifests = {name: _manifest(bundle) for name, bundle in self._bundles.items()}
        return self._builder.build([Turn("user", tuple(parts))], manifests)

    def bundle(self, name: str) -> FeatureBundle:
        return self._bundles[name]

    @torch.inference_mode()
    def ask(self, question: Question, **options: Any) -> Expected:
        """The whole model, on pixels, greedily."""
        inputs = self._inputs(question)
        output = self._model.generate(
            **inputs,
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            suppress_tokens=list(visual_token_ids(self._model.config)),
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        prompt = inputs["input_ids"][0].tolist()
        tokens = output.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(output.logits).float()
        return Expected(tuple(prompt), tuple(tokens), logits, self._builder.stop_token_ids)

    def _inputs(self, question: Question) -> Any:
        content: list[dict[str, str]] = [
            {"type": "video" if name == "clip" else "image"} for name in question.media
        ]
        message = {"role": "user", "content": [*content, {"type": "text", "text": question.text}]}
        text = self._processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        pictures = [picture(name) for name in question.media if name != "clip"]
        clips = [clip() for name in question.media if name == "clip"]
        return self._processor(
            text=[text],
            images=pictures or None,
            videos=clips or None,
            video_metadata=[_clip_metadata()] * len(clips) or None,
            do_sample_frames=False,
            return_tensors="pt",
        )

    @torch.inference_mode()
    def _encode(self, name: str) -> FeatureBundle:
        inputs = self._inputs(Question((name,), ""))
        video = name == "clip"
        pixels = inputs["pixel_values_videos" if video else "pixel_values"]
        grid = inputs["video_grid_thw" if video else "image_grid_thw"]
        output = self._model.model.get_image_features(pixels, grid)
        [main] = output.pooler_output
        levels = [level for [level] in output.deepstack_features]
        return FeatureBundle(
            modality=Modality.VIDEO if video else Modality.IMAGE,
            grid=Grid(*grid[0].tolist()),
            tensor=torch.cat([main, *levels], dim=1).clone(),
            hidden_size=main.shape[1],
            deepstack_levels=len(levels),
            timestamps=(0.25, 1.25, 2.0) if video else (),
        )


def _clip_metadata() -> VideoMetadata:
    return VideoMetadata(total_num_frames=5, fps=CLIP_FPS, frames_indices=list(range(5)))


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
        timestamps=bundle.timestamps,
        chunk_bytes=1,
        size_bytes=bundle.size_bytes,
        chunk_checksums=(),
    )
