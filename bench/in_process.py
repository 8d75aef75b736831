"""The decoder's own parts over a store in memory, without processes or gRPC; knows no checkpoint's answers."""

import asyncio
from collections.abc import Mapping, Sequence
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
from decoder_service.prompt import FeaturePart, PromptBuilder, TextPart, Turn
from decoder_service.service import DecoderService
from decoder_service.task import Task, TaskLimits
from shared.checkpoint import Checkpoint
from shared.features.bundle import FeatureBundle
from shared.features.codec import FeatureCodec
from shared.features.key import FeatureKey, namespace, tenant_tag
from shared.features.manifest import StoreDtype
from shared.store.memory import MemoryFeatureStore
