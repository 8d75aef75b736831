"""lenspair.encoder.v1 messages ↔ the values of the use case; refuses what can't be a request."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

from encoder_service.clip_settings import MAX_FPS
from encoder_service.intake import Content
from encoder_service.media_settings import RequestedSettings
from encoder_service.service import Digests, Encoded, MediumQuery
from shared.errors import InvalidRequest, NotSupported
from shared.features.key import EffectiveSettings, Modality
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.store.store import StoredFeature

_Setting = Literal["min_pixels", "max_pixels", "total_pixels", "fps", "num_frames", "do_resize"]

MAX_QUERIES = 256
MAX_LIST_FRAMES = 10_000
MAX_SECONDS = 1_000_000
SHA256_BYTES = 32

_SETTINGS: tuple[_Setting, ...] = (
    "min_pixels",
    "max_pixels",
    "total_pixels",
    "fps",
    "num_frames",
    "do_resize",
)


class _HasTimes(Protocol):
    fps: float

    @property
    def timestamps(self) -> Sequence[float]: ...
    def HasField(self, field_name: Any) -> bool: ...  # noqa: N802  protobuf's name


class _MayAllowNearMatches(Protocol):
    def HasField(self, field_name: Any) -> bool: ...  # noqa: N802  protobuf's name


def content(request: pb.EncodeRequest) -> Content:
    """What a request is about."""
    if not request.HasField("media"):
        raise InvalidRequest("media is required", field="media")
    modality = known_modality(request.media.modality, "media.modality")
    match request.media.WhichOneof("source"):
        case "data":
            return Content(modality, request.media.data)
        case "frames":
            _check_is_clip(modality, "media.frames")
            frames = request.media.frames
            times = _times(frames, len(frames.frames), "media.frames")
            return Content(modality, frames=tuple(frames.frames), times=times)
        case None:
            raise InvalidRequest("media needs data", field="media.data")
        case source:
            raise NotSupported(f"media by {source} is not served yet; send data", field=f"media.{source}")


def known_modality(modality: int, field: str) -> Modality:
    """A picture or a clip, nothing else."""
    if modality not in (pb.MODALITY_IMAGE, pb.MODALITY_VIDEO):
        raise InvalidRequest(f"{field} must be one of the contract's values", field=field)
    return Modality(modality)


def refuse_near_match(message: _MayAllowNearMatches, field: str) -> None:
    """Exact matches only, for now."""
    if message.HasField("near_match"):
        raise NotSupported("near matches are not served yet", field=field)


def requested_settings(settings: pb.MediaSettings, field: str) -> RequestedSettings:
    """The wishes of a request; what it leaves unset is None."""
    given = {name: getattr(settings, name) for name in _SETTINGS if settings.HasField(name)}
    return RequestedSettings(field=field, **given)


def medium_queries(request: pb.LookupFeaturesRequest, tenant: str) -> list[MediumQuery]:
    """The queries of a request, in their order."""
    if not 1 <= len(request.queries) <= MAX_QUERIES:
        count = len(request.queries)
        raise InvalidRequest(f"{count} queries; 1 to {MAX_QUERIES} are allowed", field="queries")
    return [_medium_query(query, tenant, f"queries[{index}]") for index, query in enumerate(request.queries)]


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


def _medium_query(query: pb.FeatureQuery, tenant: str, field: str) -> MediumQuery:
    modality = known_modality(query.modality, f"{field}.modality")
    settings = requested_settings(query.settings, f"{field}.settings")
    if query.WhichOneof("content") == "frames":
        _check_is_clip(modality, f"{field}.frames")
        sha256s = tuple(query.frames.sha256)
        times = _times(query.frames, len(sha256s), f"{field}.frames")
        if any(len(sha256) != SHA256_BYTES for sha256 in sha256s):
            raise InvalidRequest(f"sha256 must be {SHA256_BYTES} bytes each", field=f"{field}.frames.sha256")
        return MediumQuery(tenant, Digests(modality, frames=sha256s, times=times), settings)
    if len(query.sha256) != SHA256_BYTES:
        raise InvalidRequest(f"sha256 must be {SHA256_BYTES} bytes", field=f"{field}.sha256")
    return MediumQuery(tenant, Digests(modality, query.sha256), settings)


def _check_is_clip(modality: Modality, field: str) -> None:
    if modality is not Modality.VIDEO:
        raise InvalidRequest("a list of frames is a clip, not a picture", field=field)


def _times(frames: _HasTimes, count: int, field: str) -> tuple[float, ...]:
    """The time of each frame of a list, in seconds."""
    if not 1 <= count <= MAX_LIST_FRAMES:
        raise InvalidRequest(f"{count} frames; 1 to {MAX_LIST_FRAMES} are allowed", field=field)
    if frames.HasField("fps") == bool(frames.timestamps):
        raise InvalidRequest("either timestamps or fps must be given", field=f"{field}.timestamps")
    if frames.HasField("fps"):
        if not 0 < frames.fps <= MAX_FPS:  # NaN is not
            raise InvalidRequest(f"fps must be above 0 and at most {MAX_FPS:.0f}", field=f"{field}.fps")
        return tuple(number / frames.fps for number in range(count))
    times = tuple(frames.timestamps)
    is_rising = all(earlier < later for earlier, later in pairwise(times))
    if len(times) != count or not is_rising or not (times[0] >= 0 and times[-1] <= MAX_SECONDS):
        raise InvalidRequest(
            f"timestamps must be as many as frames, rising, from 0 to {MAX_SECONDS}",
            field=f"{field}.timestamps",
        )
    return times


def _effective(settings: EffectiveSettings) -> pb.EffectiveMediaSettings:
    values = {name: getattr(settings, name) for name in _SETTINGS}
    return pb.EffectiveMediaSettings(**{name: value for name, value in values.items() if value is not None})
