"""Numbers of a request: what is in range passes, all else is refused by the name of its field."""

import math
from dataclasses import replace

import pytest

from decoder_service.engine.engine import Sampling
from decoder_service.task import Task, TaskLimits, check_task
from decoder_service.turns import TextPart, Turn
from shared.errors import InvalidRequest, InvalidSampling

LIMITS = TaskLimits(
    max_output_tokens=100, default_output_tokens=20, max_prompt_characters=1000, vocab_size=960
)
TASK = Task(turns=(Turn("user", (TextPart("hello"),)),))


# G14
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.0, top_p=0.0),
        Sampling(temperature=10.0, top_p=1.0, top_k=0, top_logprobs=20),
        Sampling(temperature=0.7, top_p=0.8, top_k=20, seed=-1, top_logprobs=0),
    ],
)
def test_sampling_in_range(sampling: Sampling) -> None:
    check_task(replace(TASK, sampling=sampling), LIMITS)


# G15
@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=999999.0), "task.sampling.temperature"),
        (Sampling(temperature=-0.1), "task.sampling.temperature"),
        (Sampling(temperature=math.nan), "task.sampling.temperature"),
        (Sampling(temperature=math.inf), "task.sampling.temperature"),
        (Sampling(top_p=-1.0), "task.sampling.top_p"),
        (Sampling(top_p=1.01), "task.sampling.top_p"),
        (Sampling(top_p=math.nan), "task.sampling.top_p"),
        (Sampling(top_k=-1), "task.sampling.top_k"),
        (Sampling(top_logprobs=21), "task.top_logprobs"),
        (Sampling(top_logprobs=-1), "task.top_logprobs"),
    ],
)
def test_sampling_out_of_range(sampling: Sampling, field: str) -> None:
    with pytest.raises(InvalidSampling) as caught:
        check_task(replace(TASK, sampling=sampling), LIMITS)
    assert caught.value.field == field


# G16
@pytest.mark.parametrize("tokens", [0, -1, 101, 2**31 - 1])
def test_output_lengths_out_of_range(tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="1 to 100") as caught:
        check_task(replace(TASK, max_output_tokens=tokens), LIMITS)
    assert caught.value.field == "task.max_output_tokens"


def test_the_default_output_length_is_the_servers() -> None:
    assert TASK.output_limit(LIMITS) == 20
    assert replace(TASK, max_output_tokens=1).output_limit(LIMITS) == 1


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (replace(TASK, min_output_tokens=-1), "task.min_output_tokens"),
        (replace(TASK, max_output_tokens=5, min_output_tokens=6), "task.min_output_tokens"),
        (replace(TASK, max_output_tokens=2, continuation=(1, 2, 3)), "task.continuation_token_ids"),
        (replace(TASK, stop_sequences=("",)), "task.stop_sequences[0]"),
        (replace(TASK, stop_sequences=("a", "b" * 257)), "task.stop_sequences[1]"),
        (replace(TASK, stop_sequences=("a",) * 9), "task.stop_sequences"),
    ],
)
def test_other_fields_out_of_range(task: Task, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_task(task, LIMITS)
    assert caught.value.field == field
