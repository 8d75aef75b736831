"""Asks the running pair through its contracts and keeps token ids and log-probabilities."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from bench.reference import END
from bench.requests import FrameClip, Medium, VerifyRequest
from shared.pb.lenspair.decoder.v1 import decoder_pb2, decoder_pb2_grpc
from shared.pb.lenspair.encoder.v1 import encoder_pb2, encoder_pb2_grpc

DEADLINE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class PairAnswer:
    """`token_ids` ends with END when the model ended its answer; `first_logprobs` are the 20 best."""

    text: str
    token_ids: tuple[int, ...]
    first_logprobs: dict[int, float]


class PairClient:
    """A client of one encoder and one decoder; a context manager."""

    def __init__(self, encoder_address: str, decoder_address: str) -> None:
        self._channels = [grpc.aio.insecure_channel(a) for a in (encoder_address, decoder_address)]
        self._encoder = encoder_pb2_grpc.EncoderServiceStub(self._channels[0])
        self._decoder = decoder_pb2_grpc.DecoderServiceStub(self._channels[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    async def encode(self, medium: Medium, deadline_seconds: float = DEADLINE_SECONDS) -> str:
        """The feature key of a picture or clip."""
        if isinstance(medium, FrameClip):
            frames = encoder_pb2.FrameList(frames=medium.frames, fps=medium.fps)
            media = encoder_pb2.Media(modality=encoder_pb2.MODALITY_VIDEO, frames=frames)
        else:
            media = encoder_pb2.Media(modality=encoder_pb2.MODALITY_IMAGE, data=medium)
        request = encoder_pb2.EncodeRequest(media=media)
        response = await self._encoder.Encode(request, timeout=deadline_seconds)
        return str(response.feature.key)

    async def answer(
        self,
        request: VerifyRequest,
        continuation: Sequence[int] = (),
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> PairAnswer:
        """Encodes the pictures and generates greedily; `continuation` tokens are part of the answer.

        Each call has the deadline. Raises grpc.aio.AioRpcError.
        """
        keys = await asyncio.gather(*(self.encode(each, deadline_seconds) for each in request.media))
        task = decoder_pb2.GenerationTask(
            turns=_turns(keys, request),
            max_output_tokens=request.max_output_tokens,
            min_output_tokens=request.min_output_tokens,
            return_token_ids=True,
            top_logprobs=20,
            continuation_token_ids=continuation,
        )
        response = await self._decoder.Generate(
            decoder_pb2.GenerateRequest(task=task), timeout=deadline_seconds
        )
        return _answer(response, tuple(continuation))

    async def answer_all(self, requests: Sequence[VerifyRequest]) -> list[PairAnswer]:
        """All requests in flight together."""
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def step_intervals(self, question: str, tokens: int) -> list[float]:
        """Seconds between the tokens of one streamed answer of `tokens` tokens."""
        task = decoder_pb2.GenerationTask(
            turns=[_user_turn([], question)],
            max_output_tokens=tokens,
            ignore_eos=True,
            return_token_ids=True,
        )
        request = decoder_pb2.StreamGenerateRequest(task=task)
        arrivals = [
            time.perf_counter()
            async for message in self._decoder.StreamGenerate(request, timeout=DEADLINE_SECONDS)
            if message.HasField("delta")
        ]
        return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def _user_turn(keys: Sequence[str], question: str) -> decoder_pb2.Turn:
    parts = [decoder_pb2.Part(feature_key=key) for key in keys]
    return decoder_pb2.Turn(role=decoder_pb2.ROLE_USER, parts=[*parts, decoder_pb2.Part(text=question)])


def _turns(keys: Sequence[str], request: VerifyRequest) -> list[decoder_pb2.Turn]:
    """The pictures belong to the first question."""
    said = [text for each in request.earlier for text in (each.question, each.answer)]
    first, *others = [*said, request.question]
    roles = itertools.cycle((decoder_pb2.ROLE_ASSISTANT, decoder_pb2.ROLE_USER))
    return [
        _user_turn(keys, first),
        *(
            decoder_pb2.Turn(role=role, parts=[decoder_pb2.Part(text=text)])
            for role, text in zip(roles, others, strict=False)
        ),
    ]


def _answer(response: decoder_pb2.GenerateResponse, continuation: tuple[int, ...]) -> PairAnswer:
    has_ended = response.summary.finish_reason == decoder_pb2.FINISH_REASON_STOP
    first = response.logprobs[0].top if response.logprobs else []
    return PairAnswer(
        text=response.text,
        token_ids=continuation + tuple(response.token_ids) + ((END,) if has_ended else ()),
        first_logprobs={candidate.token_id: candidate.logprob for candidate in first},
    )
