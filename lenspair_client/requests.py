"""The flow of each method of the two clients, with their defaults filled in."""

import math
from collections.abc import Sequence
from datetime import datetime

from lenspair_client import answers, asking, stored
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Flow
from lenspair_client.options import ClientOptions, check_timeout
from lenspair_client.pictures import Pictures
from lenspair_client.values import (
    Answer,
    Feature,
    FeatureDescription,
    Generation,
    Image,
    MediaSettings,
    StoreStats,
    TokenCount,
    Turn,
)


class Requests:
    """Makes flows. A request's time begins with its first step, at the latest."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options

    def encode(self, image: Image, settings: MediaSettings | None, timeout: float | None) -> Flow[Feature]:
        pictures = self._pictures(settings, self._deadline(timeout))
        medias = yield from pictures.load([image])
        return (yield from pictures.encode(medias[0]))

    def look_up(
        self, image: Image, settings: MediaSettings | None, timeout: float | None
    ) -> Flow[Feature | None]:
        pictures = self._pictures(settings, self._deadline(timeout))
        medias = yield from pictures.load([image])
        found = yield from pictures.look_up(medias)
        return found[0]

    def ensure(
        self, images: Sequence[Image], settings: MediaSettings | None, timeout: float | None
    ) -> Flow[tuple[Feature, ...]]:
        pictures = self._pictures(settings, self._deadline(timeout))
        medias = yield from pictures.load(images)
        return tuple((yield from pictures.ensure(medias)))

    def generate(
        self, turns: Sequence[Turn], generation: Generation | None, timeout: float | None
    ) -> Flow[Answer]:
        return answers.generate(turns, generation or Generation(), self._deadline(timeout))

    def stream(
        self, turns: Sequence[Turn], generation: Generation | None, timeout: float | None
    ) -> Flow[Answer]:
        return answers.stream(turns, generation or Generation(), self._deadline(timeout))

    def count_tokens(self, turns: Sequence[Turn], timeout: float | None) -> Flow[TokenCount]:
        return answers.count_tokens(turns, self._deadline(timeout))

    def ask(
        self,
        question: str,
        images: Sequence[Image],
        *,
        system: str,
        generation: Generation | None,
        settings: MediaSettings | None,
        timeout: float | None,
        is_stream: bool,
    ) -> Flow[Answer]:
        deadline = self._deadline(timeout)
        asked = asking.Question(question, tuple(images), system, generation or Generation())
        return asking.ask(asked, self._pictures(settings, deadline), deadline, is_stream=is_stream)

    def keep_alive(
        self, features: Sequence[Feature | str], time_to_live: float, timeout: float | None
    ) -> Flow[tuple[datetime | None, ...]]:
        return stored.keep_alive(features, time_to_live, self._deadline(timeout))

    def evict(self, features: Sequence[Feature | str], timeout: float | None) -> Flow[tuple[bool, ...]]:
        return stored.evict(features, self._deadline(timeout))

    def describe(
        self, features: Sequence[Feature | str], timeout: float | None
    ) -> Flow[tuple[FeatureDescription | None, ...]]:
        return stored.describe(features, self._deadline(timeout))

    def store_stats(self, timeout: float | None) -> Flow[StoreStats]:
        return stored.store_stats(self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> Deadline:
        seconds = self._options.timeout_seconds if timeout is None else check_timeout(timeout)
        patience = self._options.patience_seconds
        return Deadline(seconds, patience=math.inf if patience is None else patience)

    def _pictures(self, settings: MediaSettings | None, deadline: Deadline) -> Pictures:
        return Pictures(
            settings or MediaSettings(),
            deadline,
            max_message_bytes=self._options.max_message_bytes,
            allow_hand_over=self._options.allow_hand_over,
        )
