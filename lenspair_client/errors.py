"""The errors of the client, and how a call's status becomes one of them.

LenspairClientError
├── UnreadableImage             a local file can't be read; nothing was sent
└── LenspairRpcError            a call failed; `code`, `reason`, `field` and `metadata` say how
    ├── InvalidArgument         the request can't be used as it is; `field` says where
    ├── Unauthenticated         the call must name its tenant: ClientOptions.metadata
    ├── NotFound
    │   └── FeatureNotFound     the store does not have it (any more); `keys` are the missing ones
    ├── FailedPrecondition      made by another checkpoint
    ├── ResourceExhausted       a queue, the store, or a message limit
    │   ├── QueueFull           call again after `retry_after` seconds
    │   └── StoreFull           the store takes no more until features in it expire
    ├── Unavailable             no server, no store, or a server that shuts down
    ├── DeadlineExceeded        the time given to the call, or to `ask`, is used up
    ├── Unimplemented           in the contract, not served
    └── Internal                a fault of the server, or a code that says nothing more
"""

from collections.abc import Iterable
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]

_DETAILS_KEY = "grpc-status-details-bin"


class LenspairClientError(Exception):
    """Everything that this package raises by design."""


class UnreadableImage(LenspairClientError):
    """A local file can't be read."""


class LenspairRpcError(LenspairClientError):
    """A call failed.

    `reason` is the stable word of the contract's comments, empty when the error is gRPC's own (no
    connection, say). `retry_after` is in seconds, where the server gave a hint.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after = retry_after

    @property
    def field(self) -> str:
        """The field of the request that is at fault; empty when it is none."""
        return self.metadata.get("field", "")

    def __str__(self) -> str:
        where = f" [{self.field}]" if self.field else ""
        return f"{self.reason or self.code.name}: {self.message}{where}"


class InvalidArgument(LenspairRpcError):
    """The request can't be used as it is."""


class Unauthenticated(LenspairRpcError):
    """The server wants to know whose call it is; `field` names the metadata that says so."""


class NotFound(LenspairRpcError):
    """What the request names is not there."""


class FeatureNotFound(NotFound):
    """Features are not in the store (any more); encode them again."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The missing keys; of very many the first ones."""
        return tuple(filter(None, self.metadata.get("keys", "").split(",")))

    @property
    def lists_all_keys(self) -> bool:
        """False when more keys are missing than `keys` has."""
        return self.metadata.get("keys_count", str(len(self.keys))) == str(len(self.keys))


class FailedPrecondition(LenspairRpcError):
    """The request does not fit the server's state: a feature of another checkpoint."""


class ResourceExhausted(LenspairRpcError):
    """Something is full, or larger than a limit."""


class QueueFull(ResourceExhausted):
    """The server has enough to do; call again after `retry_after` seconds."""


class StoreFull(ResourceExhausted):
    """The feature store takes no more, until features in it expire."""


class Unavailable(LenspairRpcError):
    """No server was reached, or it can't serve now."""


class DeadlineExceeded(LenspairRpcError):
    """The time is used up."""


class Unimplemented(LenspairRpcError):
    """The server does not serve this."""


class Internal(LenspairRpcError):
    """A fault of the server."""


class FailedCall(Protocol):
    """What grpc raises for a failed call, blocking or not."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


_BY_REASON: dict[str, type[LenspairRpcError]] = {
    "FEATURE_NOT_FOUND": FeatureNotFound,
    "QUEUE_FULL": QueueFull,
    "STORE_FULL": StoreFull,
}
_BY_CODE: dict[grpc.StatusCode, type[LenspairRpcError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}


def error_of(call: FailedCall) -> LenspairRpcError:
    """The error of a failed call, with what its google.rpc details say."""
    code = call.code()
    info, retry = _read_details(_details_in(call.trailing_metadata() or ()))
    error_class = _BY_REASON.get(info.reason) or _BY_CODE.get(code, Internal)
    return error_class(
        call.details() or code.name,
        code=code,
        reason=info.reason,
        metadata=dict(info.metadata),
        retry_after=None if retry is None else retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9,
    )


def out_of_time() -> DeadlineExceeded:
    """The error of a request whose time is used up before its next call."""
    return DeadlineExceeded("the time of the request is used up", code=grpc.StatusCode.DEADLINE_EXCEEDED)


def cut_off() -> Unavailable:
    """The error of an answer that ended without its summary."""
    return Unavailable("the answer was cut off", code=grpc.StatusCode.UNAVAILABLE)


def _details_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    return next((value for key, value in metadata if key == _DETAILS_KEY and isinstance(value, bytes)), b"")


def _read_details(data: bytes) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo | None]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    has_retry = False
    try:
        for detail in status_pb2.Status.FromString(data).details:
            detail.Unpack(info)
            has_retry = detail.Unpack(retry) or has_retry
    except DecodeError:  # a proxy on the way may put anything here; the code still counts
        return error_details_pb2.ErrorInfo(), None
    return info, retry if has_retry else None
