"""The error table, walked over the whole error tree, and the size of what it makes."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]

from shared import errors
from shared.errors import FeatureNotFound, InvalidRequest, InvalidSampling, LenspairError, QueueFull
from shared.rpc.status import DOMAIN, INTERNAL_MESSAGE, code_named, code_of, cut, status_of

PROTOS = Path("protos/lenspair")
KEY = ".".join(["a" * 64, "b" * 64, "c" * 64])
# gRPC's soft limit for all metadata of a message is 8 kB; what else is in there needs little.
MOST_BYTES = 7500


def subclasses(parent: type[LenspairError]) -> Iterator[type[LenspairError]]:
    for child in parent.__subclasses__():
        # Tests may define errors of their own; the table is about ours.
        if child.__module__ == errors.__name__:
            yield child
            yield from subclasses(child)


def an_error(error_class: type[LenspairError]) -> LenspairError:
    if error_class is FeatureNotFound:
        return FeatureNotFound([KEY])
    if error_class is QueueFull:
        return QueueFull("the queue is full", retry_after_seconds=1.5)
    return error_class("what is wrong", field="task.turns")


def details_of(status: status_pb2.Status, kind: type[Message]) -> list[Any]:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


ALL = list(subclasses(LenspairError))
REASONS = [LenspairError.reason, *(error_class.reason for error_class in ALL)]


@pytest.mark.parametrize("error_class", ALL)
def test_every_error_has_a_code_of_its_own_kind_and_one_error_info(error_class: type[LenspairError]) -> None:
    error = an_error(error_class)
    status = status_of(error)
    assert code_of(error) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert status.code == code_of(error).value[0]
    (info,) = details_of(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (error.reason, DOMAIN)
    assert info.metadata.get("field", "") == error.field
    assert status.message == error.message


def test_reasons_are_unique() -> None:
    assert len(set(REASONS)) == len(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_the_contract_names_every_reason(reason: str) -> None:
    comments = "".join(path.read_text() for path in PROTOS.glob("*/v1/*.proto"))
    assert re.search(rf"\b{reason}\b", comments)


@pytest.mark.parametrize("error_class", [InvalidRequest, *subclasses(InvalidRequest)])
def test_refused_requests_name_the_field_as_a_violation_too(error_class: type[LenspairError]) -> None:
    (bad,) = details_of(status_of(an_error(error_class)), error_details_pb2.BadRequest)
    assert [(violation.field, violation.description) for violation in bad.field_violations] == [
        ("task.turns", "what is wrong")
    ]


def test_a_full_queue_says_when_to_call_again() -> None:
    status = status_of(QueueFull("full", retry_after_seconds=1.5))
    (retry,) = details_of(status, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.5


def test_an_error_of_a_new_kind_has_the_code_of_its_parent() -> None:
    class OddTemperature(InvalidSampling):
        reason = "ODD_TEMPERATURE"

    assert code_of(OddTemperature("odd")) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("error", [ValueError("a secret"), LenspairError("a secret"), OSError("a secret")])
def test_the_text_of_an_unknown_error_stays_here(error: Exception) -> None:
    status = status_of(error)
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert status.message == INTERNAL_MESSAGE
    assert b"secret" not in status.SerializeToString()
    (info,) = details_of(status, error_details_pb2.ErrorInfo)
    assert info.reason == "INTERNAL"


@pytest.mark.parametrize("character", ["x", "ß", "語", "🙂", "\ud800"])
def test_long_texts_are_cut_to_what_metadata_holds(character: str) -> None:
    metadata = {f"detail_{number}": character * 5000 for number in range(50)}
    error = InvalidRequest(character * 20_000, field=character * 20_000, **metadata)
    assert metadata_bytes(status_of(error)) < MOST_BYTES


def test_of_many_missing_keys_the_first_are_listed_whole_and_all_are_counted() -> None:
    keys = [KEY.replace("c", f"{number:x}"[-1]) for number in range(500)]
    status = status_of(FeatureNotFound(keys))
    (info,) = details_of(status, error_details_pb2.ErrorInfo)
    listed = info.metadata["keys"].split(",")
    assert len(listed) >= 5
    assert listed == keys[: len(listed)]
    assert info.metadata["keys_count"] == "500"
    assert metadata_bytes(status) < MOST_BYTES


def test_a_cut_never_splits_a_character() -> None:
    for size in range(4, 40):
        short = cut("語🙂ß" * 10, size)
        assert len(short.encode()) <= size
        assert short.endswith("...")
    assert cut("語🙂ß", 9) == "語🙂ß"


@pytest.mark.parametrize(("reported", "name"), [(None, "OK"), (0, "OK"), (5, "NOT_FOUND")])
def test_a_context_reports_codes_in_several_forms(reported: object, name: str) -> None:
    assert code_named(reported).name == name
    assert code_named(grpc.StatusCode.NOT_FOUND) is grpc.StatusCode.NOT_FOUND


def metadata_bytes(status: status_pb2.Status) -> int:
    """What the status takes on the wire: the message percent-encoded, the details in base64."""
    percent = sum(1 if 0x20 <= byte <= 0x7E else 3 for byte in status.message.encode())
    return percent + len(base64.b64encode(status.SerializeToString()))
