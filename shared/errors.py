"""The errors that callers may see; knows nothing of gRPC status codes (see shared/rpc/status.py).

    LenspairError
    ├── InvalidRequest              a field of the request can't be used
    │   ├── InvalidMedia            the bytes are no picture or clip that we can read
    │   ├── MediaTooLarge           bytes, pixels or frames above a limit
    │   ├── InvalidMediaSettings    pixel budgets, frame rates
    │   ├── InvalidSampling         temperature, top-p and their kin
    │   ├── MalformedFeatureKey     not the text of a key at all
    │   └── PromptTooLong           text and visual tokens exceed the context
    ├── TenantRequired              the call does not say which tenant it belongs to
    ├── FeatureNotFound             the store does not have it (any more); encode again
    ├── FeatureRevisionMismatch     made by another checkpoint, or in a layout unknown here
    ├── QueueFull                   try again after `retry_after_seconds`
    ├── OutOfMemory                 the device can't compute this request even alone
    ├── StoreFull                   the store refused to take more
    ├── StoreUnavailable            the store does not answer
    ├── NotReady                    this server still loads its model
    ├── Draining                    this server shuts down
    ├── DeadlineExceeded            the time of the request is used up
    └── NotSupported                in the contract, not served yet

Messages are for callers: they name the field and the limit, and never hold internals.
"""

from collections.abc import Sequence
from typing import ClassVar


class LenspairError(Exception):
    """An error with a stable `reason`; `metadata` travels to the caller as it is."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.metadata = metadata


class InvalidRequest(LenspairError):
    reason = "INVALID_REQUEST"


class InvalidMedia(InvalidRequest):
    reason = "INVALID_MEDIA"


class MediaTooLarge(InvalidRequest):
    reason = "MEDIA_TOO_LARGE"


class InvalidMediaSettings(InvalidRequest):
    reason = "INVALID_MEDIA_SETTINGS"


class InvalidSampling(InvalidRequest):
    reason = "INVALID_SAMPLING"


class MalformedFeatureKey(InvalidRequest):
    reason = "MALFORMED_FEATURE_KEY"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class TenantRequired(LenspairError):
    reason = "TENANT_REQUIRED"


class FeatureNotFound(LenspairError):
    """Lists every missing key of the request, so that a caller can encode them all at once."""

    reason = "FEATURE_NOT_FOUND"

    def __init__(self, keys: Sequence[str], *, field: str = "task.turns.parts.feature_key") -> None:
        super().__init__(
            f"{len(keys)} of the named features are not in the store; encode them again",
            field=field,
            keys=",".join(keys),
        )
        self.keys = tuple(keys)


class FeatureRevisionMismatch(LenspairError):
    reason = "FEATURE_REVISION_MISMATCH"


class QueueFull(LenspairError):
    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class OutOfMemory(LenspairError):
    reason = "OUT_OF_MEMORY"


class StoreFull(LenspairError):
    reason = "STORE_FULL"


class StoreUnavailable(LenspairError):
    reason = "STORE_UNAVAILABLE"


class NotReady(LenspairError):
    reason = "NOT_READY"


class Draining(LenspairError):
    reason = "DRAINING"


class DeadlineExceeded(LenspairError):
    reason = "DEADLINE_EXCEEDED"


class NotSupported(LenspairError):
    reason = "NOT_SUPPORTED"
