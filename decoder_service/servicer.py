"""Translates between the decoder's contract and its use case; knows neither torch nor the store."""

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from decoder_service.answer import Ending, Piece
from decoder_service.engine.engine import Sampling, TokenOutput
from decoder_service.engine.sequence import Priority
from decoder_service.output_format import OutputFormat
from decoder_service.prompt import FeaturePart, Part, TextPart, Turn
from decoder_service.service import DecoderService
from decoder_service.task import Task
from shared.errors import InvalidRequest
from shared.pb.lenspair.decoder.v1 import decoder_pb2 as pb
from shared.pb.lenspair.decoder.v1 import decoder_pb2_grpc
from shared.rpc.tenant import tenant_of

Context = grpc.aio.ServicerContext[Any, Any]

_ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant"}
_PRIORITIES: dict[int, Priority] = {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_HIGH: Priority.HIGH,
}
_FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class DecoderServicer(decoder_pb2_grpc.DecoderServiceServicer):
    """The decoder's gRPC face.

    It can be registered before the model is loaded; the server refuses calls until it serves, and by then
    `use` must have been called.
    """

    _service: DecoderService

    def use(self, service: DecoderService) -> None:
        self._service = service

    async def Generate(  # noqa: N802 - the contract's name
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        task = _task(request.task)
        samples = {index: _WholeSample(index) for index in task.sample_indices}
        summary = pb.Summary()
        async with aclosing(self._service.answer(task, tenant_of(context))) as values:
            async for value in values:
                if isinstance(value, Ending):
                    summary = _summary(value)
                else:
                    samples[value.sample_index].add(_delta(value, request.task))
        first, *further = [sample.finish() for sample in samples.values()]
        return pb.GenerateResponse(
            text=first.text,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            summary=summary,
            further_samples=further,
        )

    async def StreamGenerate(  # noqa: N802 - the contract's name
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        task = _task(request.task)
        async with aclosing(self._service.answer(task, tenant_of(context))) as values:
            async for value in values:
                if isinstance(value, Ending):
                    yield pb.StreamGenerateResponse(summary=_summary(value))
                elif (delta := _delta(value, request.task)).ByteSize():  # else there is nothing to send
                    delta.sample_index = value.sample_index
                    yield pb.StreamGenerateResponse(delta=delta)

    async def CountTokens(  # noqa: N802 - the contract's name
        self, request: pb.CountTokensRequest, context: Context
    ) -> pb.CountTokensResponse:
        count = await self._service.count_tokens(_turns(request.turns, "turns"), tenant_of(context))
        return pb.CountTokensResponse(
            input_tokens=count.input_tokens,
            visual_tokens=count.visual_tokens,
            context_tokens=count.context_tokens,
        )


class _WholeSample:
    """A sample as it grows."""

    def __init__(self, index: int) -> None:
        self._sample = pb.Sample(sample_index=index)
        self._texts: list[str] = []

    def add(self, delta: pb.Delta) -> None:
        self._texts.append(delta.text)
        self._sample.token_ids.extend(delta.token_ids)
        self._sample.logprobs.extend(delta.logprobs)

    def finish(self) -> pb.Sample:
        self._sample.text = "".join(self._texts)
        return self._sample


def _task(task: pb.GenerationTask) -> Task:
    return Task(
        turns=_turns(task.turns, "task.turns"),
        sampling=_sampling(task),
        max_output_tokens=task.max_output_tokens if task.HasField("max_output_tokens") else None,
        min_output_tokens=task.min_output_tokens,
        stop_sequences=tuple(task.stop_sequences),
        stop_token_ids=tuple(task.stop_token_ids),
        ignore_eos=task.ignore_eos,
        continuation=tuple(task.continuation_token_ids),
        priority=_priority(task.priority),
        sample_count=task.sample_count or 1,
        first_sample=task.first_sample,
        output_format=_output_format(task.output_format) if task.HasField("output_format") else None,
    )


def _output_format(form: pb.OutputFormat) -> OutputFormat:
    match form.WhichOneof("format"):
        case "json_schema":
            return OutputFormat("json_schema", (form.json_schema,))
        case "regex":
            return OutputFormat("regex", (form.regex,))
        case "choices":
            return OutputFormat("choices", tuple(form.choices.values))
        case _:
            raise InvalidRequest(
                "a format is a JSON schema, a regular expression or choices", field="task.output_format"
            )


def _priority(value: int) -> Priority:
    if value not in _PRIORITIES:
        raise InvalidRequest("priority must be low, normal or high", field="task.priority")
    return _PRIORITIES[value]


def _sampling(task: pb.GenerationTask) -> Sampling:
    given = task.sampling
    return Sampling(
        temperature=given.temperature,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        seed=given.seed if given.HasField("seed") else None,
        top_logprobs=task.top_logprobs if task.HasField("top_logprobs") else None,
    )


def _turns(turns: Iterable[pb.Turn], name: str) -> tuple[Turn, ...]:
    return tuple(_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns))


def _turn(turn: pb.Turn, name: str) -> Turn:
    if turn.role not in _ROLES:
        raise InvalidRequest("role must be system, user or assistant", field=f"{name}.role")
    return Turn(
        role=_ROLES[turn.role],
        parts=tuple(_part(part, f"{name}.parts[{index}]") for index, part in enumerate(turn.parts)),
    )


def _part(part: pb.Part, name: str) -> Part:
    if part.feature_source and part.WhichOneof("content") != "feature_key":
        raise InvalidRequest(
            "feature_source stands beside a feature_key only", field=f"{name}.feature_source"
        )
    match part.WhichOneof("content"):
        case "text":
            return TextPart(part.text)
        case "feature_key":
            return FeaturePart(part.feature_key, part.feature_source)
        case _:
            raise InvalidRequest("a part is a text or a feature key", field=name)


def _delta(piece: Piece, task: pb.GenerationTask) -> pb.Delta:
    delta = pb.Delta(text=piece.text)
    if task.return_token_ids:
        delta.token_ids.extend(map(_token_id, piece.tokens))
    if task.HasField("top_logprobs"):
        delta.logprobs.extend(map(_logprobs, piece.tokens))
    return delta


def _logprobs(token: TokenOutput) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=_token_id(token),
        logprob=token.logprob or 0.0,
        top=[pb.TopLogprob(token_id=one.token_id, logprob=one.logprob) for one in token.top],
    )


def _token_id(token: TokenOutput) -> int:
    assert token.token_id is not None
    return token.token_id


def _summary(ending: Ending) -> pb.Summary:
    return pb.Summary(
        finish_reason=_FINISH_REASONS[ending.finish],
        input_tokens=ending.input_tokens,
        visual_tokens=ending.visual_tokens,
        output_tokens=ending.output_tokens,
        reused_tokens=ending.reused_tokens,
        time_to_first_token=_duration(ending.time_to_first_token),
        queue_time=_duration(ending.queue_time),
        samples=[
            pb.SampleSummary(
                sample_index=sample.sample_index,
                finish_reason=_FINISH_REASONS[sample.finish],
                output_tokens=sample.output_tokens,
            )
            for sample in ending.samples
        ],
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
