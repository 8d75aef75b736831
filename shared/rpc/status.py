"""The one error table of the product: which status a caller sees for which error.

Everything that goes into a status is cut to a size that always fits into gRPC's metadata (8 kB by
default, base64 and percent-encoding included): a longer one would reach the caller as
RESOURCE_EXHAUSTED, with the true code lost.
"""

from collections.abc import Iterable, Iterator, Mapping

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped, unused-ignore]

from shared.errors import (
    DeadlineExceeded,
    Draining,
    FeatureNotFound,
    FeatureRevisionMismatch,
    InvalidRequest,
    LenspairError,
    NotReady,
    NotSupported,
    OutOfMemory,
    QueueFull,
    StoreFull,
    StoreUnavailable,
    TenantRequired,
)

DOMAIN = "lenspair"
INTERNAL_MESSAGE = "internal error of the server; its log has the details"

MESSAGE_BYTES = 400
METADATA_BYTES = 3200
VALUE_BYTES = 600

# What the other rooms call a status code.
Code = grpc.StatusCode

_CODES: Mapping[type[BaseException], Code] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    TenantRequired: grpc.StatusCode.UNAUTHENTICATED,
    FeatureNotFound: grpc.StatusCode.NOT_FOUND,
    FeatureRevisionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    NotSupported: grpc.StatusCode.UNIMPLEMENTED,
}

OK = grpc.StatusCode.OK
CANCELLED = grpc.StatusCode.CANCELLED
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
INTERNAL = grpc.StatusCode.INTERNAL


def code_of(error: BaseException) -> Code:
    """The status code of an error, by the nearest class in its MRO; INTERNAL for what we don't know."""
    return next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), INTERNAL)


def code_named(value: object) -> Code:
    """The status code that a servicer context reports: a member, its number, or nothing for OK."""
    if isinstance(value, Code):
        return value
    return next((code for code in Code if code.value[0] == value), OK)


def status_of(error: BaseException) -> status_pb2.Status:
    """What a caller gets to see of an error: a message and exactly one ErrorInfo, capped in size.

    The text of an unknown error stays here: the caller gets a fixed sentence.
    """
    code = code_of(error)
    if not isinstance(error, LenspairError) or code is INTERNAL:
        return _status(INTERNAL, INTERNAL_MESSAGE, [_error_info(LenspairError.reason, {})])
    return _status(code, cut(error.message, MESSAGE_BYTES), _details(error))


def cut(text: str, max_bytes: int) -> str:
    """The longest beginning of a text that fits into so many bytes of UTF-8; marked where it was cut."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode(errors="ignore") + "..."


def _details(error: LenspairError) -> Iterator[Message]:
    yield _error_info(error.reason, _metadata(error))
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut(error.field, VALUE_BYTES), description=cut(error.message, MESSAGE_BYTES)
        )
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, QueueFull):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(1, round(1000 * error.retry_after_seconds)))
        yield retry


def _metadata(error: LenspairError) -> dict[str, str]:
    metadata = {"field": error.field} if error.field else {}
    if isinstance(error, FeatureNotFound):
        return metadata | _listed_keys(error.keys)
    return metadata | error.metadata


def _listed_keys(keys: tuple[str, ...]) -> dict[str, str]:
    """Whole keys only, as many as fit; the count tells a caller that there are more."""
    listed: list[str] = []
    room = METADATA_BYTES - VALUE_BYTES
    for key in keys:
        room -= len(key.encode()) + 1
        if room < 0:
            break
        listed.append(key)
    return {"keys": ",".join(listed), "keys_count": str(len(keys))}


def _error_info(reason: str, metadata: Mapping[str, str]) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    room = METADATA_BYTES
    for name, value in metadata.items():
        # A list of keys is cut at whole keys already; nothing else needs more than a few words.
        short = value if name == "keys" else cut(value, VALUE_BYTES)
        room -= len(name.encode()) + len(short.encode())
        if room < 0:
            break
        info.metadata[name] = short
    return info


def _status(code: Code, message: str, details: Iterable[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status
