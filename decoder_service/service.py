"""The use case of the decoder: features by key, prompt, engine, text; knows neither gRPC nor tensors."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from decoder_service.answer import Answer, Ending, Piece, ending_of
from decoder_service.byte_budget import ByteBudget
from decoder_service.engine.engine import (
    Engine,
    GenerationRequest,
    Limits,
    Prompt,
    TokenGrammar,
)
from decoder_service.feature_reader import FeatureReader, Location, NamedKey
from decoder_service.grammars import Grammars
from decoder_service.merging import merge
from decoder_service.observation import Generation, stage
from decoder_service.prompt import FeaturePart, PromptBuilder, TextPart, Turn
from decoder_service.stored_tensors import StoredTensors
from decoder_service.task import Task, TaskLimits, check_task
from shared.errors import PromptTooLong
from shared.features.content_id import content_id


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The length of a prompt, and the context that it must fit into together with its output."""

    input_tokens: int
    visual_tokens: int
    context_tokens: int


class DecoderService:
    """Answers questions about stored features.

    `feature_budget` bounds the bytes of tensors that were fetched and wait for their first token; what a
    process cache keeps is bounded there, and counts here too while it waits. `model_name` is what traces
    call the model.
    """

    def __init__(
        self,
        reader: FeatureReader,
        prompts: PromptBuilder,
        engine: Engine,
        limits: TaskLimits,
        feature_budget: ByteBudget,
        *,
        grammars: Grammars,
        model_name: str,
    ) -> None:
        self._reader = reader
        self._prompts = prompts
        self._engine = engine
        self._limits = limits
        self._feature_budget = feature_budget
        self._grammars = grammars
        self._model_name = model_name
        self._numbers = itertools.count(1)

    async def answer(self, task: Task, tenant: str) -> AsyncGenerator[Piece | Ending, None]:
        """Yields pieces of the answer as they come, then one Ending.

        Raises InvalidRequest and its kin, FeatureNotFound, FeatureRevisionMismatch, QueueFull or
        StoreUnavailable, all of them before the first piece; Draining at any time.
        """
        arrived = time.monotonic()
        check_task(task, self._limits)
        locations = await self._look_up(task.turns, tenant, "task.turns")
        prompt = await self._build(task.turns, locations, "task.turns")
        limits = self._engine_limits(task, prompt)
        answers = [
            Answer(self._prompts.detokenizer(task.stop_sequences), task.continuation, index)
            for index in task.sample_indices
        ]
        grammars = [await self._grammar(task) for _ in task.sample_indices]
        generation = Generation(self._model_name, prompt, task, limits)
        with generation.recorded():
            requests = self._requests(task, prompt, limits, tenant, locations=locations, grammars=grammars)
            streams = [self._sample(*each) for each in zip(requests, answers, strict=True)]
            async with aclosing(merge(streams)) as pieces:
                async for _, piece in pieces:
                    yield piece
            ending = ending_of(answers, prompt, arrived)
            generation.finish(ending)
        yield ending

    async def count_tokens(self, turns: Sequence[Turn], tenant: str) -> TokenCount:
        """How long a prompt is. Reads manifests only, and computes nothing."""
        prompt = await self._build(turns, await self._look_up(turns, tenant, "turns"), "turns")
        return TokenCount(len(prompt.token_ids), prompt.visual_tokens, self._engine.context_tokens)

    async def _sample(self, request: GenerationRequest, answer: Answer) -> AsyncGenerator[Piece, None]:
        if answer.finish:  # the continuation holds a stop sequence
            return
        async with aclosing(self._engine.generate(request, answer.timings)) as stretches:
            async for outputs in stretches:
                yield answer.add(outputs)
                if answer.finish:
                    return

    def _requests(
        self,
        task: Task,
        prompt: Prompt,
        limits: Limits,
        tenant: str,
        *,
        locations: Mapping[str, Location],
        grammars: Sequence[TokenGrammar | None],
    ) -> Iterator[GenerationRequest]:
        """One for each sample; they share the prompt, and with it what the engine computes of it."""
        tensors = StoredTensors(self._reader, self._feature_budget, task.turns, locations)
        feature_ids = tuple(_feature_id(locations[key]) for key in tensors.keys)
        for index, grammar in zip(task.sample_indices, grammars, strict=True):
            yield GenerationRequest(
                request_id=str(next(self._numbers)),
                prompt=prompt,
                features=tensors.for_sample(),
                sampling=replace(task.sampling, sample_index=index),
                limits=limits,
                feature_ids=feature_ids,
                prefix_root=tenant.encode(),
                continuation=task.continuation,
                priority=task.priority,
                grammar=grammar,
            )

    async def _grammar(self, task: Task) -> TokenGrammar | None:
        """The state of one sample's form."""
        if task.output_format is None:
            return None
        return await self._grammars.begin(task.output_format, task.continuation)

    async def _look_up(self, turns: Sequence[Turn], tenant: str, field: str) -> dict[str, Location]:
        names = [
            NamedKey(part.key, f"{field}[{i}].parts[{j}].feature_key", part.source)
            for i, turn in enumerate(turns)
            for j, part in enumerate(turn.parts)
            if isinstance(part, FeaturePart)
        ]
        with stage("look_up"):
            return await self._reader.look_up(names, tenant)

    async def _build(self, turns: Sequence[Turn], locations: Mapping[str, Location], field: str) -> Prompt:
        """Off the event loop: tokenizing a long text takes a while."""
        texts = [part.text for turn in turns for part in turn.parts if isinstance(part, TextPart)]
        characters = sum(map(len, texts))
        most = self._limits.max_prompt_characters
        if characters > most:
            raise PromptTooLong(f"the turns have {characters} characters, the limit is {most}", field=field)
        manifests = {text: location.manifest for text, location in locations.items()}
        with stage("prompt"):
            return await asyncio.to_thread(self._prompts.build, turns, manifests, field=field)

    def _engine_limits(self, task: Task, prompt: Prompt) -> Limits:
        """The task's limits, with the output cut to what the context leaves."""
        context = self._engine.context_tokens
        visual = prompt.visual_tokens
        text = len(prompt.token_ids) - visual
        left = context - text - visual
        if left < max(1, task.min_output_tokens, len(task.continuation)):
            raise PromptTooLong(
                f"the prompt has {text} text tokens and {visual} visual tokens; together with the output "
                f"they must fit into {context}",
                field="task.turns",
            )
        ends = frozenset() if task.ignore_eos else self._prompts.stop_token_ids
        return Limits(
            max_output_tokens=min(left, task.output_limit(self._limits)),
            stop_token_ids=frozenset(task.stop_token_ids) | ends,
            min_output_tokens=task.min_output_tokens,
        )


def _feature_id(location: Location) -> bytes:
    """What was handed over is not in the store, so nobody can delete it there: it serves one question."""
    return secrets.token_bytes(32) if location.source else content_id(location.manifest)
