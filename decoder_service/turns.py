"""What a caller says, turn by turn, and what makes a conversation that can be answered."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """The picture or clip of a feature key stands here; `source` is what the caller knows of its encoder."""

    key: str
    source: str = ""


Part = TextPart | FeaturePart


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says; `role` is "system", "user" or "assistant"."""

    role: str
    parts: tuple[Part, ...]


def check_turns(turns: Sequence[Turn], *, field: str = "task.turns") -> None:
    """Raises InvalidRequest, naming the field, for turns that are no conversation with a last question."""
    if not turns:
        raise InvalidRequest("at least one turn is required", field=field)
    for index, turn in enumerate(turns):
        _check_turn(turn, index, f"{field}[{index}]")
    if turns[-1].role != "user":
        raise InvalidRequest("the last turn must be the user's", field=f"{field}[{len(turns) - 1}].role")


def _check_turn(turn: Turn, index: int, field: str) -> None:
    if turn.role not in ROLES:
        raise InvalidRequest(f"a role is one of {', '.join(ROLES)}", field=f"{field}.role")
    if turn.role == "system" and index > 0:
        raise InvalidRequest("only the first turn may be the system's", field=f"{field}.role")
    if not turn.parts:
        raise InvalidRequest("a turn needs at least one part", field=f"{field}.parts")
    for number, part in enumerate(turn.parts):
        _check_part(part, turn.role, f"{field}.parts[{number}]")


def _check_part(part: Part, role: str, field: str) -> None:
    match part:
        case FeaturePart() if role != "user":
            raise InvalidRequest(f"a {role} turn holds text only", field=f"{field}.feature_key")
        case TextPart(text) if not is_unicode(text):
            raise InvalidRequest("the text holds half of a surrogate pair", field=f"{field}.text")


def is_unicode(text: str) -> bool:
    """False for a text with half of a surrogate pair, which no message can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
