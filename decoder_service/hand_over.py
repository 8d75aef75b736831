"""Features that encoders hand over directly: who is believed and asked, and what is accepted.

Everything that a caller or an encoder says is checked: the source against the store key and the operator's
list before anything is connected, the record like one from the store. It knows no gRPC.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Final, Literal, Protocol, get_args

import structlog
from opentelemetry import trace
from prometheus_client import Counter

from decoder_service.allowed_sources import AllowedSources
from shared.features.bundle import FeatureBundle
from shared.features.codec import FeatureCodec
from shared.features.damage import DamageCause, DamagedRecord, IncompleteRecord, UnusableRecord
from shared.features.key import FeatureKey
from shared.features.manifest import Manifest
from shared.features.source import Address, SourceSeal
from shared.rpc.feature_source import SourceFailed, SourceLacksFeature, SourceTimedOut, SourceUnreachable

Outcome = Literal[
    "manifest", "tensor", "forged", "not_allowed", "missing", "timed_out", "unreachable", "unusable"
]

HAND_OVERS = Counter(
    "lenspair_decoder_hand_overs_total",
    "Sources in requests by what came of them: manifest or tensor fetched; forged or not_allowed, so that "
    "nobody was asked; missing, timed_out, unreachable or unusable at the encoder.",
    ["outcome"],
)
for _outcome in get_args(Outcome):
    HAND_OVERS.labels(_outcome)

# One time-out for this many bytes, like for a batch of chunks from the store.
_BYTES_A_TIMEOUT: Final = 8 * 1024 * 1024

_log = structlog.get_logger("lenspair.hand_over")
_tracer = trace.get_tracer("lenspair.decoder")


class Calls(Protocol):
    """FeatureCalls in shared/rpc/feature_source.py."""

    def fetch(
        self, address: Address, key: FeatureKey, *, timeout_seconds: float, manifest_only: bool
    ) -> AsyncGenerator[bytes, None]: ...


class HandedOverFeatures:
    """A FeatureSource: asks encoders whose sources hold and whose addresses are allowed."""

    def __init__(
        self,
        codec: FeatureCodec,
        seal: SourceSeal,
        allowed: AllowedSources,
        calls: Calls,
        *,
        timeout_seconds: float,
    ) -> None:
        self._codec = codec
        self._seal = seal
        self._allowed = allowed
        self._calls = calls
        self._timeout_seconds = timeout_seconds

    async def manifest(self, key: FeatureKey, source: str) -> Manifest | None:
        address = self._address(key, source)
        if address is None:
            return None
        with _observed(address, "manifest"):
            fetched = self._calls.fetch(
                address, key, timeout_seconds=self._timeout_seconds, manifest_only=True
            )
            async with aclosing(fetched) as parts:
                return await self._read_manifest(key, parts)
        return None

    async def bundle(self, manifest: Manifest, source: str) -> FeatureBundle | None:
        address = self._address(manifest.key, source)
        if address is None:
            return None
        seconds = self._timeout_seconds * (1 + manifest.size_bytes // _BYTES_A_TIMEOUT)
        with _observed(address, "tensor"):
            fetched = self._calls.fetch(address, manifest.key, timeout_seconds=seconds, manifest_only=False)
            async with aclosing(fetched) as parts:
                if await self._read_manifest(manifest.key, parts) != manifest:
                    raise IncompleteRecord  # the encoder has made it anew meanwhile
                return await self._read_tensor(manifest, parts)
        return None

    def _address(self, key: FeatureKey, source: str) -> Address | None:
        address = self._seal.open(source, key)
        if address is None:
            _count("forged")
            return None
        if not self._allowed.allows(address):
            _log.warning("a source is not under LENSPAIR_ALLOWED_SOURCES", address=str(address))
            _count("not_allowed")
            return None
        return address

    async def _read_manifest(self, key: FeatureKey, parts: AsyncIterator[bytes]) -> Manifest:
        sealed = await anext(parts, None)
        if sealed is None:
            raise IncompleteRecord
        return self._codec.decode_manifest(key, sealed)

    async def _read_tensor(self, manifest: Manifest, pieces: AsyncIterator[bytes]) -> FeatureBundle:
        """Never takes more bytes than the manifest promised, and reads nothing behind them."""
        assembly = self._codec.assembly(manifest)
        index, left, buffer = 0, manifest.size_bytes, bytearray()
        async for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise DamagedRecord(DamageCause.LENGTH)
            buffer += piece
            while buffer and len(buffer) >= (size := manifest.chunk_size(index)):
                await asyncio.to_thread(assembly.add, index, buffer[:size])
                del buffer[:size]
                index += 1
            if not left:
                return await asyncio.to_thread(assembly.finish)
        raise IncompleteRecord


@contextmanager
def _observed(address: Address, step: Literal["manifest", "tensor"]) -> Iterator[None]:
    """Books how one question to an encoder ended. Failures end here: whoever asked goes on without."""
    with _tracer.start_as_current_span(f"decode.hand_over_{step}") as span:
        outcome: Outcome = step
        try:
            yield
        except (SourceFailed, UnusableRecord) as problem:
            outcome = _outcome_of(problem)
            _log.warning("a feature was not handed over", address=str(address), outcome=outcome)
            span.set_status(trace.StatusCode.ERROR)
        span.set_attribute("lenspair.hand_over.outcome", outcome)
        _count(outcome)


def _count(outcome: Outcome) -> None:
    HAND_OVERS.labels(outcome).inc()


def _outcome_of(problem: Exception) -> Outcome:
    match problem:
        case SourceLacksFeature():
            return "missing"
        case SourceTimedOut():
            return "timed_out"
        case SourceUnreachable():
            return "unreachable"
        case _:
            return "unusable"
