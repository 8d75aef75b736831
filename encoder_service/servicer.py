"""The RPCs of lenspair.encoder.v1: parse, call, answer. Errors become statuses in shared/rpc."""

import io
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from encoder_service import messages, stored_messages
from encoder_service.intake import Content
from encoder_service.media_settings import RequestedSettings
from encoder_service.service import EncoderService, Medium
from encoder_service.stored_features import StoredFeatures
from shared.errors import InvalidRequest
from shared.features.key import FeatureKey, Modality
from shared.pb.lenspair.encoder.v1 import encoder_pb2 as pb
from shared.pb.lenspair.encoder.v1 import encoder_pb2_grpc as pb_grpc
from shared.rpc.deadline import remaining_seconds
from shared.rpc.tenant import tenant_of

Context = grpc.aio.ServicerContext[Any, Any]


class EncoderServicer(pb_grpc.EncoderServiceServicer):
    """Translates between messages and the two use cases.

    It can be registered before the model is loaded; the server refuses calls until it serves, and by then
    `use` must have been called.
    """

    _service: EncoderService
    _stored: StoredFeatures

    def use(self, service: EncoderService, stored: StoredFeatures) -> None:
        self._service = service
        self._stored = stored

    async def Encode(  # noqa: N802  the name in the contract
        self, request: pb.EncodeRequest, context: Context
    ) -> pb.EncodeResponse:
        content = messages.content(request)
        messages.refuse_near_match(request, "near_match")
        settings = messages.requested_settings(request.settings, "settings")
        medium = self._medium(content, settings, context, allow_hand_over=request.allow_hand_over)
        encoded = await self._service.encode(medium)
        return pb.EncodeResponse(**messages.answer_fields(encoded))

    async def StreamEncode(  # noqa: N802  the name in the contract
        self, request_iterator: AsyncIterator[pb.StreamEncodeRequest], context: Context
    ) -> pb.StreamEncodeResponse:
        header = await _header(request_iterator)
        settings = messages.requested_settings(header.settings, "header.settings")
        modality = Modality(header.modality)
        self._service.check_announced(header.size_bytes, modality, settings)
        content = Content(modality, await _body(request_iterator, header.size_bytes))
        medium = self._medium(content, settings, context, allow_hand_over=header.allow_hand_over)
        encoded = await self._service.encode(medium)
        return pb.StreamEncodeResponse(**messages.answer_fields(encoded))

    async def LookupFeatures(  # noqa: N802  the name in the contract
        self, request: pb.LookupFeaturesRequest, context: Context
    ) -> pb.LookupFeaturesResponse:
        queries = messages.medium_queries(request, tenant_of(context))
        found = await self._service.look_up(queries)
        refs = [None if feature is None else messages.feature_ref(feature) for feature in found]
        return pb.LookupFeaturesResponse(results=[pb.LookupResult(feature=ref) for ref in refs])

    async def KeepAlive(  # noqa: N802  the name in the contract
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        keys = stored_messages.feature_keys(request.keys)
        seconds = stored_messages.seconds_to_live(request)
        times = await self._stored.keep_alive(tenant_of(context), keys, seconds)
        return stored_messages.keep_alive_response(times)

    async def Evict(  # noqa: N802  the name in the contract
        self, request: pb.EvictRequest, context: Context
    ) -> pb.EvictResponse:
        keys = stored_messages.feature_keys(request.keys)
        return stored_messages.evict_response(await self._stored.evict(tenant_of(context), keys))

    async def DescribeFeatures(  # noqa: N802  the name in the contract
        self, request: pb.DescribeFeaturesRequest, context: Context
    ) -> pb.DescribeFeaturesResponse:
        keys = stored_messages.feature_keys(request.keys)
        return stored_messages.describe_response(await self._stored.describe(tenant_of(context), keys))

    async def GetStoreStats(  # noqa: N802  the name in the contract
        self, request: pb.GetStoreStatsRequest, context: Context
    ) -> pb.GetStoreStatsResponse:
        return stored_messages.stats_response(await self._stored.stats(tenant_of(context)))

    async def FetchFeatures(  # noqa: N802  the name in the contract
        self, request: pb.FetchFeaturesRequest, context: Context
    ) -> AsyncIterator[pb.FetchFeaturesResponse]:
        hand_over = self._service.hand_over
        held = hand_over.open(FeatureKey.parse(request.key, field="key"), tenant_of(context))
        sealed_manifest, pieces = held.record.sealed_manifest, hand_over.pieces(held)
        del held  # a caller who stops reading must not hold it
        yield pb.FetchFeaturesResponse(manifest=sealed_manifest)
        if not request.manifest_only:
            for piece in pieces:
                yield pb.FetchFeaturesResponse(piece=piece)

    def _medium(
        self, content: Content, settings: RequestedSettings, context: Context, *, allow_hand_over: bool
    ) -> Medium:
        deadline = self._service.deadline_in(remaining_seconds(context))
        return Medium(tenant_of(context), content, settings, deadline, allow_hand_over)


async def _header(requests: AsyncIterator[pb.StreamEncodeRequest]) -> pb.StreamEncodeHeader:
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("message") != "header":
        raise InvalidRequest("the first message must be the header", field="header")
    messages.known_modality(first.header.modality, "header.modality")
    messages.refuse_near_match(first.header, "header.near_match")
    if first.header.size_bytes < 1:
        raise InvalidRequest("size_bytes must be above 0", field="header.size_bytes")
    return first.header


async def _body(requests: AsyncIterator[pb.StreamEncodeRequest], size_bytes: int) -> bytes:
    """All chunks together: exactly the declared number of bytes, never holding more."""
    body = io.BytesIO()
    async for request in requests:
        if request.WhichOneof("message") != "chunk" or not request.chunk:
            raise InvalidRequest("after the header only chunks with bytes may follow", field="chunk")
        if body.tell() + len(request.chunk) > size_bytes:
            raise InvalidRequest(f"more than the declared {size_bytes} bytes were sent", field="chunk")
        body.write(request.chunk)
    if body.tell() < size_bytes:
        raise InvalidRequest(
            f"{body.tell()} of the declared {size_bytes} bytes were sent", field="header.size_bytes"
        )
    return body.getvalue()
