"""The flow of `ask`: look up, encode what is missing, generate, and encode again what has gone since."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lenspair_client.answers import generate, stream
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow
from lenspair_client.errors import FeatureNotFound
from lenspair_client.pictures import Pictures
from lenspair_client.progress import Progress
from lenspair_client.values import Answer, Feature, Generation, Turn


@dataclass(frozen=True, slots=True)
class Question:
    """What a caller of `ask` wants to know: the pictures stand before the text, in their order."""

    text: str
    images: tuple[bytes | Path, ...]
    system: str
    generation: Generation

    def turns(self, features: Sequence[Feature]) -> tuple[Turn, ...]:
        """The prompt, once the pictures have features."""
        user = Turn("user", (*features, self.text))
        return (Turn("system", (self.system,)), user) if self.system else (user,)


def ask(question: Question, pictures: Pictures, deadline: Deadline, *, is_stream: bool) -> Flow[Answer]:
    """Answers a question about pictures. A feature that is lost on the way is encoded again, once."""
    medias = yield from pictures.load(question.images)
    features = yield from pictures.ensure(medias)
    encode_seconds = deadline.elapsed()
    progress = Progress()
    try:
        answer = yield from _answer(question, features, deadline, progress, is_stream=is_stream)
    except FeatureNotFound as error:
        missing = error.keys if error.lists_all_keys else ()
        began = deadline.elapsed()
        features = yield from pictures.encode_again(medias, features, missing)
        encode_seconds += deadline.elapsed() - began
        answer = yield from _answer(question, features, deadline, progress, is_stream=is_stream)
    return replace(answer, features=tuple(features), encode_seconds=encode_seconds)


def _answer(
    question: Question,
    features: Sequence[Feature],
    deadline: Deadline,
    progress: Progress,
    *,
    is_stream: bool,
) -> Flow[Answer]:
    turns = question.turns(features)
    if is_stream:
        return (yield from stream(turns, question.generation, deadline, progress))
    return (yield from generate(turns, question.generation, deadline))
