"""The flows of answers: whole, streamed, resumed at another decoder."""

from collections.abc import Sequence
from dataclasses import replace

from lenspair_client import messages, retry
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow, Method, Open, Read, Show, Unary
from lenspair_client.errors import LenspairRpcError, cut_off
from lenspair_client.persistence import Failures, call, persist
from lenspair_client.progress import Progress
from lenspair_client.values import Answer, Generation, TokenCount, Turn
from shared.pb.lenspair.decoder.v1 import decoder_pb2


def generate(turns: Sequence[Turn], generation: Generation, deadline: Deadline) -> Flow[Answer]:
    """A whole answer; asked for again when its decoder goes away or is busy."""
    answer = yield from persist(lambda: generate_once(turns, generation, deadline), deadline)
    return finished(answer, deadline)


def stream(turns: Sequence[Turn], generation: Generation, deadline: Deadline) -> Flow[Answer]:
    """Shows an answer as it comes; goes on with it at another decoder when one goes away."""
    progress, failures = Progress(), Failures(deadline)
    answer = yield from persist(
        lambda: stream_once(turns, generation, deadline, progress, failures),
        deadline,
        failures,
        lambda error: progress.can_resume and retry.may_pass(error),
    )
    return finished(answer, deadline)


def count_tokens(turns: Sequence[Turn], deadline: Deadline) -> Flow[TokenCount]:
    """The length of a prompt."""
    request = decoder_pb2.CountTokensRequest(turns=messages.turn_messages(turns))
    return messages.token_count_of((yield from call(Method.COUNT_TOKENS, request, deadline)))


def generate_once(turns: Sequence[Turn], generation: Generation, deadline: Deadline) -> Flow[Answer]:
    """A whole answer, from one call."""
    task = messages.generation_task(turns, generation, is_stream=False)
    request = decoder_pb2.GenerateRequest(task=task)
    response = yield Unary(Method.GENERATE, request, deadline.for_next_call())
    return messages.whole_answer_of(response)


def stream_once(
    turns: Sequence[Turn],
    generation: Generation,
    deadline: Deadline,
    progress: Progress,
    failures: Failures,
) -> Flow[Answer]:
    """Shows the rest of an answer, behind what `progress` has of it, from one stream."""
    if generation.samples != 1:
        raise ValueError("a stream shows one sample; open one for each first_sample instead")
    task = messages.generation_task(turns, generation, received=progress.token_ids, is_stream=True)
    progress.begin_stream()
    try:
        yield Open(decoder_pb2.StreamGenerateRequest(task=task), deadline.for_next_call())
        while (message := (yield Read())) is not None:
            failures.forget()
            text = progress.take(message)
            if text:
                yield Show(text)
    except LenspairRpcError:
        if progress.summary is None:  # else the answer was whole before the stream broke
            raise
    if progress.summary is None:
        raise cut_off()
    return progress.answer()


def finished(answer: Answer, deadline: Deadline) -> Answer:
    """The answer with what its request took."""
    return replace(answer, total_seconds=deadline.elapsed(), repeated=deadline.repeated)
