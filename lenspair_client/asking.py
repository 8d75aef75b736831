"""The flow of `ask`: look up, encode what is missing, generate, and encode again what has gone since."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lenspair_client import answers, retry
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow
from lenspair_client.errors import FeatureNotFound, LenspairRpcError
from lenspair_client.media import Media
from lenspair_client.persistence import Failures, persist
from lenspair_client.pictures import Pictures
from lenspair_client.progress import Progress
from lenspair_client.values import Answer, Feature, Generation, Image, Turn

# A feature that is lost again and again is lost for good: the services have different stores or store keys.
_MOST_LOSSES = 8


@dataclass(frozen=True, slots=True)
class Question:
    """What a caller of `ask` wants to know: the pictures stand before the text, in their order."""

    text: str
    images: tuple[Image, ...]
    system: str
    generation: Generation

    def turns(self, features: Sequence[Feature]) -> tuple[Turn, ...]:
        """The prompt, once the pictures have features."""
        user = Turn("user", (*features, self.text))
        return (Turn("system", (self.system,)), user) if self.system else (user,)


def ask(question: Question, pictures: Pictures, deadline: Deadline, *, is_stream: bool) -> Flow[Answer]:
    """Answers a question about pictures. Features that the decoder can't get are encoded again."""
    medias = yield from pictures.load(question.images)
    features = yield from pictures.ensure(medias)
    asking = _Asking(question, pictures, deadline, medias, features, is_stream=is_stream)
    answer = yield from persist(asking.attempt, deadline, asking.failures, asking.helps)
    answer = replace(answer, features=tuple(asking.features), encode_seconds=asking.encode_seconds)
    return answers.finished(answer, deadline)


class _Asking:
    """One question on its way: its features, and what has come of its answer."""

    def __init__(
        self,
        question: Question,
        pictures: Pictures,
        deadline: Deadline,
        medias: Sequence[Media],
        features: Sequence[Feature],
        *,
        is_stream: bool,
    ) -> None:
        self.features = features
        self.failures = Failures(deadline)
        self.encode_seconds = deadline.elapsed()
        self._question = question
        self._pictures = pictures
        self._deadline = deadline
        self._medias = medias
        self._progress = Progress() if is_stream else None
        # The keys that the decoder could not get: none of them is known when it is empty.
        self._missing: Collection[str] | None = None
        self._num_losses = 0

    def helps(self, error: LenspairRpcError) -> bool:
        can_resume = self._progress is None or self._progress.can_resume
        is_lost = isinstance(error, FeatureNotFound) and self._num_losses <= _MOST_LOSSES
        return can_resume and (is_lost or retry.may_pass(error))

    def attempt(self) -> Flow[Answer]:
        yield from self._renew_features()
        try:
            return (yield from self._answer())
        except LenspairRpcError as error:
            self._missing = _missing(error)
            self._num_losses += isinstance(error, FeatureNotFound)
            raise

    def _renew_features(self) -> Flow[None]:
        if self._missing is None:
            return
        began = self._deadline.elapsed()
        self.features = yield from self._pictures.encode_again(self._medias, self.features, self._missing)
        self._missing = None
        self.encode_seconds += self._deadline.elapsed() - began

    def _answer(self) -> Flow[Answer]:
        turns, generation = self._question.turns(self.features), self._question.generation
        if self._progress is None:
            return answers.generate_once(turns, generation, self._deadline)
        return answers.stream_once(turns, generation, self._deadline, self._progress, self.failures)


def _missing(error: LenspairRpcError) -> Collection[str] | None:
    """The keys to encode again: those that are named, or all (empty), or None that need be.

    A decoder whose store does not answer may get a feature from an encoder that has just made it; and
    encoding is cheap when the store has the feature after all.
    """
    if isinstance(error, FeatureNotFound):
        return error.keys if error.lists_all_keys else ()
    return () if error.reason == "STORE_UNAVAILABLE" else None
