"""The flows of pictures: looked up, encoded, or whichever it takes to have their features."""

from collections.abc import Collection, Sequence
from functools import partial

from lenspair_client import messages
from lenspair_client.deadline import Deadline
from lenspair_client.effects import Effect, Flow, Load, Method, Together, Unary, Upload
from lenspair_client.errors import Unavailable
from lenspair_client.media import Media
from lenspair_client.persistence import persist
from lenspair_client.values import Feature, Image, MediaSettings

# Room for everything in an Encode message but the picture.
_MESSAGE_OVERHEAD_BYTES = 4096
# The contract's limit for one LookupFeatures call.
_MOST_QUERIES = 256


class Pictures:
    """Makes the flows of one request's pictures: its settings and its time hold for all of them."""

    def __init__(
        self,
        settings: MediaSettings,
        deadline: Deadline,
        *,
        max_message_bytes: int,
        allow_hand_over: bool = True,
    ) -> None:
        self._settings = settings
        self._allow_hand_over = allow_hand_over
        self._deadline = deadline
        self._most_bytes = max_message_bytes - _MESSAGE_OVERHEAD_BYTES

    def load(self, images: Sequence[Image]) -> Flow[list[Media]]:
        """Reads all pictures."""
        medias: list[Media] = yield Together([_load(image) for image in images])
        return medias

    def look_up(self, medias: Sequence[Media]) -> Flow[list[Feature | None]]:
        """What the store has of them; nothing is sent or computed."""
        return persist(partial(self._look_up_once, medias), self._deadline)

    def encode(self, media: Media) -> Flow[Feature]:
        """Sends one picture; waits and sends again where that can help."""
        return persist(partial(self._encode_once, media), self._deadline)

    def ensure(self, medias: Sequence[Media]) -> Flow[list[Feature]]:
        """The features of all pictures, in their order; what the store has not is encoded.

        The look-up only saves sending: where it can't be made now, all pictures are sent.
        """
        distinct = list(dict.fromkeys(medias))
        try:
            found = yield from self._look_up_once(distinct)
        except Unavailable:
            self._deadline.repeated += 1
            found = [None] * len(distinct)
        features = {media: feature for media, feature in zip(distinct, found, strict=True) if feature}
        features |= yield from self._encode_all([media for media in distinct if media not in features])
        return [features[media] for media in medias]

    def encode_again(
        self, medias: Sequence[Media], features: Sequence[Feature], missing_keys: Collection[str]
    ) -> Flow[list[Feature]]:
        """The same features after those of `missing_keys` (empty: any of them) are encoded once more."""
        current = dict(zip(medias, features, strict=True))
        gone = [media for media, feature in current.items() if feature.key in missing_keys]
        current |= yield from self._encode_all(gone or list(current))
        return [current[media] for media in medias]

    def _encode_all(self, medias: Sequence[Media]) -> Flow[dict[Media, Feature]]:
        features = yield Together([self.encode(media) for media in medias])
        return dict(zip(medias, features, strict=True))

    def _look_up_once(self, medias: Sequence[Media]) -> Flow[list[Feature | None]]:
        found: list[Feature | None] = []
        for start in range(0, len(medias), _MOST_QUERIES):
            request = messages.lookup_request(medias[start : start + _MOST_QUERIES], self._settings)
            response = yield Unary(Method.LOOK_UP, request, self._deadline.for_next_call())
            found += messages.features_found(response)
        return found

    def _encode_once(self, media: Media) -> Flow[Feature]:
        return messages.feature_of((yield self._call_with(media)))

    def _call_with(self, media: Media) -> Effect:
        timeout = self._deadline.for_next_call()
        if len(media.data) > self._most_bytes:
            chunks = partial(
                messages.encode_chunks, media, self._settings, allow_hand_over=self._allow_hand_over
            )
            return Upload(chunks, timeout)
        request = messages.encode_request(media, self._settings, allow_hand_over=self._allow_hand_over)
        return Unary(Method.ENCODE, request, timeout)


def _load(image: Image) -> Flow[Media]:
    media: Media = yield Load(image)
    return media
