"""The flows of answers: whole, streamed, resumed at another decoder."""

from collections.abc import Sequence
from dataclasses import replace

from lenspair_client import messages, retry
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow, Method, Open, Read, Show, Sleep, Unary
from lenspair_client.errors import LenspairRpcError, cut_off
from lenspair_client.progress import Progress
from lenspair_client.values import Answer, Generation, TokenCount, Turn
from shared.pb.lenspair.decoder.v1 import decoder_pb2


def generate(turns: Sequence[Turn], generation: Generation, deadline: Deadline) -> Flow[Answer]:
    """A whole answer; asked for once more when its decoder went away."""
    task = messages.generation_task(turns, generation, is_stream=False)
    request = decoder_pb2.GenerateRequest(task=task)
    attempt = 1
    while True:
        try:
            response = yield Unary(Method.GENERATE, request, deadline.for_next_call())
            break
        except LenspairRpcError as error:
            wait = retry.wait_before_generate(error, attempt, deadline.remaining())
            if wait is None:
                raise
        yield Sleep(wait)
        attempt += 1
    answer = messages.answer_of(response.summary, response.text, response.token_ids, response.logprobs)
    return replace(answer, total_seconds=deadline.elapsed())


def stream(
    turns: Sequence[Turn], generation: Generation, deadline: Deadline, progress: Progress
) -> Flow[Answer]:
    """Shows an answer as it comes; goes on with it at another decoder when one goes away.

    `progress` is where an earlier flow of the same answer stopped, or a new one.
    """
    while progress.summary is None:
        try:
            yield from _stream_once(turns, generation, deadline, progress)
        except LenspairRpcError as error:
            wait = _wait_before_resuming(error, progress, deadline)
            if wait is None:
                raise
            yield Sleep(wait)
    return replace(progress.answer(), total_seconds=deadline.elapsed())


def count_tokens(turns: Sequence[Turn], deadline: Deadline) -> Flow[TokenCount]:
    """The length of a prompt."""
    request = decoder_pb2.CountTokensRequest(turns=messages.turn_messages(turns))
    response = yield Unary(Method.COUNT_TOKENS, request, deadline.for_next_call())
    return messages.token_count_of(response)


def _stream_once(
    turns: Sequence[Turn], generation: Generation, deadline: Deadline, progress: Progress
) -> Flow[None]:
    task = messages.generation_task(turns, generation, received=progress.token_ids, is_stream=True)
    yield Open(decoder_pb2.StreamGenerateRequest(task=task), deadline.for_next_call())
    while (message := (yield Read())) is not None:
        text = progress.take(message)
        if text:
            yield Show(text)
    if progress.summary is None:
        raise cut_off()


def _wait_before_resuming(error: LenspairRpcError, progress: Progress, deadline: Deadline) -> float | None:
    if progress.summary is not None:  # the answer was whole before the stream broke
        return 0.0
    without_progress = progress.fail()
    if not progress.can_resume:
        return None
    return retry.wait_before_resuming(
        error, progress.failures, without_progress, deadline.remaining(), has_begun=progress.has_begun
    )
