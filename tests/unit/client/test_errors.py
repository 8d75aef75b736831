"""How a failed call becomes an error of the client."""

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]

from lenspair_client import errors
from lenspair_client.errors import LenspairRpcError, error_of
from shared.errors import FeatureNotFound, InvalidSampling, LenspairError, QueueFull, StoreFull
from shared.rpc.status import code_of, status_of


@dataclass(frozen=True, slots=True)
class Call:
    """A failed call as grpc shows it."""

    status_code: grpc.StatusCode
    text: str | None = "what went wrong"
    metadata: tuple[tuple[str, str | bytes], ...] | None = ()

    def code(self) -> grpc.StatusCode:
        return self.status_code

    def details(self) -> str | None:
        return self.text

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        return self.metadata


def answered_with(error: LenspairError) -> LenspairRpcError:
    """What the client makes of a server's error."""
    details = status_of(error).SerializeToString()
    metadata = (("other", "x"), ("grpc-status-details-bin", details))
    return error_of(Call(code_of(error), error.message, metadata))


def test_a_refusal_names_field_and_reason() -> None:
    error = answered_with(InvalidSampling("too hot", field="task.sampling", limit="10"))
    assert isinstance(error, errors.InvalidArgument)
    assert (error.reason, error.field, error.message) == ("INVALID_SAMPLING", "task.sampling", "too hot")
    assert error.metadata["limit"] == "10"
    assert str(error) == "INVALID_SAMPLING: too hot [task.sampling]"
    assert error.retry_after is None


def test_a_full_queue_brings_its_hint() -> None:
    error = answered_with(QueueFull("full", retry_after_seconds=1.25))
    assert isinstance(error, errors.QueueFull)
    assert error.retry_after == 1.25


def test_a_hint_of_any_size_is_read() -> None:
    """What stands between may send anything."""
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = 2**62
    status = status_pb2.Status()
    status.details.add().Pack(retry)
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    assert error_of(Call(grpc.StatusCode.UNAVAILABLE, metadata=metadata)).retry_after == 2.0**62


def test_a_full_store_is_told_from_a_message_that_is_too_large() -> None:
    assert isinstance(answered_with(StoreFull("full")), errors.StoreFull)
    assert type(error_of(Call(grpc.StatusCode.RESOURCE_EXHAUSTED))) is errors.ResourceExhausted


def test_missing_features_are_listed() -> None:
    error = answered_with(FeatureNotFound(["a", "b"]))
    assert isinstance(error, errors.FeatureNotFound)
    assert error.keys == ("a", "b")
    assert error.lists_all_keys


def test_very_many_missing_features_are_not_all_listed() -> None:
    error = answered_with(FeatureNotFound(["k" * 194] * 100))
    assert isinstance(error, errors.FeatureNotFound)
    assert 0 < len(error.keys) < 100
    assert not error.lists_all_keys


@pytest.mark.parametrize(
    ("code", "error_class"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.NOT_FOUND, errors.NotFound),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unimplemented),
        (grpc.StatusCode.INTERNAL, errors.Internal),
        (grpc.StatusCode.UNKNOWN, errors.Internal),
    ],
)
def test_every_code_has_its_class(code: grpc.StatusCode, error_class: type[LenspairRpcError]) -> None:
    error = error_of(Call(code))
    assert type(error) is error_class
    assert (error.code, error.reason, error.field) == (code, "", "")
    assert str(error) == f"{code.name}: what went wrong"


@pytest.mark.parametrize(
    "metadata",
    [None, (), (("grpc-status-details-bin", b"\xff\xff"),), (("grpc-status-details-bin", "text"),)],
)
def test_unreadable_details_leave_the_code(metadata: tuple[tuple[str, str | bytes], ...] | None) -> None:
    error = error_of(Call(grpc.StatusCode.NOT_FOUND, None, metadata))
    assert (error.code, error.message) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")


def test_the_errors_are_drawn_in_their_module() -> None:
    def names(parent: type[Exception]) -> set[str]:
        children = parent.__subclasses__()
        return {child.__name__ for child in children}.union(*map(names, children))

    drawn = errors.__doc__ or ""
    assert all(name in drawn for name in names(errors.LenspairClientError))
