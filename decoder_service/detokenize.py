"""Tokens to text as it may be shown: whole characters, nothing of a stop sequence; knows no requests.

A token of a byte-level vocabulary is a few bytes, and a character can be spread over several tokens. Bytes
go through an incremental UTF-8 decoder, so the joined deltas are exactly what decoding all tokens at once
gives, with one exception: a last character that is never completed is dropped. What depends on the tokens
alone comes out the same when the same tokens are fed again, so a resumed answer goes on at the right
character.
"""

import codecs
from collections.abc import Collection, Iterator, Mapping, Sequence


class Vocabulary:
    """The bytes of each token; none for special tokens, and for ids that name no token."""

    def __init__(self, token_ids: Mapping[str, int], special_ids: Collection[int] = ()) -> None:
        bytes_of = {token_id: _bytes_of(token) for token, token_id in token_ids.items()}
        self._bytes = bytes_of | dict.fromkeys(special_ids, b"")

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")


class Detokenizer:
    """The text of one answer, delta by delta, up to the first of its stop sequences."""

    def __init__(self, vocabulary: Vocabulary, stop_sequences: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stop_sequences = tuple(stop_sequences)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """True once a stop sequence has appeared; the text before it is out then."""
        return self._is_stopped

    def add(self, token_id: int) -> str:
        """The characters that can be shown now; a possible beginning of a stop sequence is held back."""
        if self._is_stopped:
            return ""
        self._held += self._decoder.decode(self._vocabulary.bytes_of(token_id))
        stop = self._first_stop()
        self._is_stopped = stop is not None
        if stop is None:
            return self._release(len(self._held) - self._possible_stop())
        delta = self._release(stop)
        self._held = ""
        return delta

    def finish(self) -> str:
        """What was held back, at the end of an answer. An incomplete character is dropped."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        delta, self._held = self._held[:count], self._held[count:]
        return delta

    def _first_stop(self) -> int | None:
        places = (self._held.find(stop) for stop in self._stop_sequences)
        return min((place for place in places if place >= 0), default=None)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that a stop sequence begins with."""
        return max((_overlap(self._held, stop) for stop in self._stop_sequences), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


def _byte_level_alphabet() -> Iterator[tuple[str, int]]:
    """Byte-level BPE writes each byte as a printable character: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = 0x100
    for byte in range(256):
        if byte in printable:
            yield chr(byte), byte
        else:
            yield chr(stand_in), byte
            stand_in += 1


_BYTE_OF = dict(_byte_level_alphabet())


def _bytes_of(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()
