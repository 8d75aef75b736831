"""The Python client of a Lenspair pair, for internal callers.

    with LenspairClient("encoder:50051", "decoder:50052") as client:
        answer = client.ask("Which shape is red?", [Path("shapes.png")])
        print(answer.text)

Needs grpcio and protobuf only; knows the contracts and nothing else of the services.
"""

from lenspair_client.aio import AsyncLenspairClient
from lenspair_client.client import LenspairClient
from lenspair_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FeatureNotFound,
    Internal,
    InvalidArgument,
    LenspairClientError,
    LenspairRpcError,
    NotFound,
    QueueFull,
    ResourceExhausted,
    StoreFull,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    UnreadableImage,
)
from lenspair_client.options import ClientOptions
from lenspair_client.values import (
    Answer,
    Candidate,
    Clip,
    Feature,
    FeatureDescription,
    Generation,
    MediaSettings,
    Outcome,
    RequestCounts,
    StoreStats,
    TokenCount,
    TokenLogprobs,
    Turn,
    Usage,
)

__all__ = [
    "Answer",
    "AsyncLenspairClient",
    "Candidate",
    "ClientOptions",
    "Clip",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Feature",
    "FeatureDescription",
    "FeatureNotFound",
    "Generation",
    "Internal",
    "InvalidArgument",
    "LenspairClient",
    "LenspairClientError",
    "LenspairRpcError",
    "MediaSettings",
    "NotFound",
    "Outcome",
    "QueueFull",
    "RequestCounts",
    "ResourceExhausted",
    "StoreFull",
    "StoreStats",
    "TokenCount",
    "TokenLogprobs",
    "Turn",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UnreadableImage",
    "Usage",
]
