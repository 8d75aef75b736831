"""lenspair.encoder.v1 messages ↔ the values of the use case; refuses what can't be a request."""

from typing import Any, Literal, Protocol

from encoder_service.media_settings import RequestedSettings
from encoder_service.service import Encoded, PictureQuery
from shared.errors import InvalidRequest, NotSupported
from shared.features.key import EffectiveSettings
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.store.store import StoredFeature

_Setting = Literal["min_pixels", "max_pixels", "total_pixels", "fps", "num_frames", "do_resize"]

MAX_QUERIES = 256
SHA256_BYTES = 32

_SETTINGS: tuple[_Setting, ...] = (
    "min_pixels",
    "max_pixels",
    "total_pixels",
    "fps",
    "num_frames",
    "do_resize",
)


class _MayAllowNearMatches(Protocol):
    def HasField(self, field_name: Any) -> bool: ...  # noqa: N802  protobuf's name


def picture_bytes(request: pb.EncodeRequest) -> bytes:
    """The encoded picture of a request."""
    if not request.HasField("media"):
        raise InvalidRequest("media is required", field="media")
    check_modality(request.media.modality, "media.modality")
    source = request.media.WhichOneof("source")
    if source is None:
        raise InvalidRequest("media needs data", field="media.data")
    if source != "data":
        raise NotSupported(f"media by {source} is not served yet; send data", field=f"media.{source}")
    return request.media.data


def check_modality(modality: int, field: str) -> None:
    """Pictures only, for now."""
    if modality == pb.MODALITY_VIDEO:
        raise NotSupported("clips are not served yet", field=field)
    if modality != pb.MODALITY_IMAGE:
        raise InvalidRequest(f"{field} must be one of the contract's values", field=field)


def refuse_near_match(message: _MayAllowNearMatches, field: str) -> None:
    """Exact matches only, for now."""
    if message.HasField("near_match"):
        raise NotSupported("near matches are not served yet", field=field)


def requested_settings(settings: pb.MediaSettings, field: str) -> RequestedSettings:
    """The wishes of a request; what it leaves unset is None."""
    given = {name: getattr(settings, name) for name in _SETTINGS if settings.HasField(name)}
    return RequestedSettings(field=field, **given)


def picture_queries(request: pb.LookupFeaturesRequest, tenant: str) -> list[PictureQuery]:
    """The queries of a request, in their order."""
    if not 1 <= len(request.queries) <= MAX_QUERIES:
        count = len(request.queries)
        raise InvalidRequest(f"{count} queries; 1 to {MAX_QUERIES} are allowed", field="queries")
    return [_picture_query(query, tenant, f"queries[{index}]") for index, query in enumerate(request.queries)]


def feature_ref(feature: StoredFeature, source: str = "") -> pb.FeatureRef:
    """The reference that callers pass on."""
    manifest = feature.manifest
    ref = pb.FeatureRef(
        key=str(manifest.key),
        modality=pb.Modality.ValueType(int(manifest.modality)),
        grid_thw=pb.GridThw(t=manifest.grid.t, h=manifest.grid.h, w=manifest.grid.w),
        token_count=manifest.token_count,
        size_bytes=manifest.size_bytes,
        source=source,
    )
    ref.expire_time.FromDatetime(feature.expires_at)
    return ref


def answer_fields(encoded: Encoded) -> dict[str, Any]:
    """The fields that EncodeResponse and StreamEncodeResponse share."""
    return {
        "feature": feature_ref(encoded.feature, encoded.source),
        "outcome": pb.Outcome.ValueType(int(encoded.outcome)),
        "effective_settings": _effective(encoded.settings),
    }


def _picture_query(query: pb.FeatureQuery, tenant: str, field: str) -> PictureQuery:
    check_modality(query.modality, f"{field}.modality")
    content = query.WhichOneof("content")
    if content == "frames":
        raise NotSupported("lists of frames are not served yet", field=f"{field}.frames")
    if content is None or len(query.sha256) != SHA256_BYTES:
        raise InvalidRequest(f"sha256 must be {SHA256_BYTES} bytes", field=f"{field}.sha256")
    return PictureQuery(tenant, query.sha256, requested_settings(query.settings, f"{field}.settings"))


def _effective(settings: EffectiveSettings) -> pb.EffectiveMediaSettings:
    values = {name: getattr(settings, name) for name in _SETTINGS}
    return pb.EffectiveMediaSettings(**{name: value for name, value in values.items() if value is not None})
