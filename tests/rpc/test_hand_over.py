"""Features go from encoder to decoder directly when a real store fails, to those who may have them."""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from decoder_service.prompt import PromptBuilder
from demo.pair import DEMO_CHECKPOINT
from demo.ports import free_port
from encoder_service.preprocess import ImagePreprocessor
from shared.checkpoint import open_checkpoint
from shared.features.key import FeatureKey
from shared.pb.lenspair.decoder.v1 import decoder_pb2
from shared.pb.lenspair.encoder.v1 import encoder_pb2
from tests.feature_samples import same_bytes
from tests.redis_servers import SERVER_KINDS, start_server
from tests.rpc.hand_over_pair import (
    TIMEOUT_SECONDS,
    Decoder,
    Encoder,
    question,
    redis_store,
    served_decoder,
    served_encoder,
    task,
)
from tests.rpc.servers import failure_of
from tests.unit.encoder.samples import encoded, noise

SECONDS = 20
# One time-out of the store and one of a source, and what a busy machine takes on top.
MOST_SECONDS = 2 * TIMEOUT_SECONDS + 2
PICTURE = encoded(noise(96, 64))
FULL = {"maxmemory": "1kb", "maxmemory-policy": "noeviction"}

Fault = Literal["killed", "stopped", "full"]
FAULTS: tuple[Fault, ...] = ("killed", "stopped", "full")


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.open(open_checkpoint(str(DEMO_CHECKPOINT)))


@pytest.fixture(scope="module")
def preprocessor() -> ImagePreprocessor:
    return ImagePreprocessor.open(Path("demo/checkpoint"))


class Store:
    """A real server on one port that can be harmed and mended."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.port = free_port()
        self.server = start_server(kind, port=self.port)

    @property
    def url(self) -> str:
        return self.server.url

    def harm(self, fault: Fault) -> None:
        match fault:
            case "killed":
                self.server.stop()
            case "stopped":
                os.kill(self.server.pid, signal.SIGSTOP)
            case "full":
                self._start_anew(FULL)

    def mend(self, fault: Fault) -> None:
        if fault == "stopped":
            os.kill(self.server.pid, signal.SIGCONT)
        else:
            self._start_anew({})

    def _start_anew(self, options: dict[str, str]) -> None:
        self.server.stop()
        self.server = start_server(self.kind, options, port=self.port)


@pytest.fixture(params=SERVER_KINDS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = Store(request.param)
    yield store
    store.server.stop()


@dataclass(frozen=True, slots=True)
class Pair:
    encoder: Encoder
    decoder: Decoder

    async def encode(self, *, allow: bool = True, tenant: str = "") -> Any:
        media = encoder_pb2.Media(modality=encoder_pb2.MODALITY_IMAGE, data=PICTURE)
        request = encoder_pb2.EncodeRequest(media=media, allow_hand_over=allow)
        return await self.encoder.stub.Encode(request, timeout=SECONDS, metadata=_named(tenant))

    def ask(self, ref: Any, *, source: str | None = None, tenant: str = "") -> Any:
        named = question(ref.key, ref.source if source is None else source)
        request = decoder_pb2.GenerateRequest(task=named)
        return self.decoder.stub.Generate(request, timeout=SECONDS, metadata=_named(tenant))

    def tensor(self) -> Any:
        """That of the last question."""
        [bundle] = self.decoder.engine.features[-1]
        return bundle.tensor


@asynccontextmanager
async def a_pair(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, url: str, *, allowed: str = "127.0.0.0/8"
) -> AsyncIterator[Pair]:
    encoder_store, decoder_store = redis_store(url), redis_store(url)
    try:
        async with (
            served_encoder(preprocessor, encoder_store) as encoder,
            served_decoder(prompts, decoder_store, allowed=allowed) as decoder,
        ):
            yield Pair(encoder, decoder)
    finally:
        await encoder_store.close()
        await decoder_store.close()


@pytest.fixture
async def pair(preprocessor: ImagePreprocessor, prompts: PromptBuilder, store: Store) -> AsyncIterator[Pair]:
    async with a_pair(preprocessor, prompts, store.url) as running:
        yield running


def _named(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("x-tenant", tenant),) if tenant else ()


# S05, S15
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_picture_is_answered_without_the_store(pair: Pair, store: Store, fault: Fault) -> None:
    stored = (await pair.encode()).feature
    assert stored.source == ""
    await pair.ask(stored)
    expected = pair.tensor()
    assert pair.decoder.dials == []
    store.harm(fault)
    try:
        first, again = await pair.encode(), await pair.encode()
        answer = await pair.ask(first.feature)
    finally:
        if fault == "stopped":
            store.mend(fault)
    assert (first.outcome, again.outcome) == (encoder_pb2.OUTCOME_ENCODED, encoder_pb2.OUTCOME_HIT)
    assert first.feature.source == again.feature.source != ""
    assert pair.encoder.harness.tower.passes == [1, 1]
    assert first.feature.key == stored.key
    assert answer.summary.visual_tokens == first.feature.token_count == stored.token_count
    assert same_bytes(pair.tensor(), expected)
    assert pair.decoder.dials == [pair.encoder.address]


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_is_not_allowed_ends_in_time_with_a_typed_error(
    pair: Pair, store: Store, fault: Fault
) -> None:
    store.harm(fault)
    try:
        reasons = []
        key = str(FeatureKey("0" * 64, "1" * 64, "2" * 64))
        offered = (await pair.encode()).feature
        for call in (
            lambda: pair.encode(allow=False),
            lambda: pair.ask(offered, source=""),
            lambda: pair.ask(encoder_pb2.FeatureRef(key=key), source=""),
        ):
            started = time.monotonic()
            reasons.append((await failure_of(call())).reason)
            assert time.monotonic() - started < MOST_SECONDS
    finally:
        if fault == "stopped":
            store.mend(fault)
    unreachable = ["STORE_UNAVAILABLE", "STORE_UNAVAILABLE", "FEATURE_NOT_FOUND"]
    assert reasons == (["STORE_FULL", *["FEATURE_NOT_FOUND"] * 2] if fault == "full" else unreachable)
    assert pair.decoder.dials == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_store_that_is_back_gets_it_without_the_tower(pair: Pair, store: Store, fault: Fault) -> None:
    store.harm(fault)
    offered = (await pair.encode()).feature
    await pair.ask(offered)
    expected = pair.tensor()
    store.mend(fault)
    stored = await pair.encode(allow=False)
    assert (stored.outcome, stored.feature.source) == (encoder_pb2.OUTCOME_HIT, "")
    assert pair.encoder.harness.tower.passes == [1]
    dials = list(pair.decoder.dials)
    await pair.ask(offered, source="")
    assert same_bytes(pair.tensor(), expected)
    assert pair.decoder.dials == dials


@pytest.mark.parametrize("fault", FAULTS)
async def test_text_touches_neither_store_nor_sources(pair: Pair, store: Store, fault: Fault) -> None:
    store.harm(fault)
    try:
        pair.decoder.engine.script = (100, 101)
        text_only = task([decoder_pb2.Part(text="Say hello.")])
        started = time.monotonic()
        request = decoder_pb2.GenerateRequest(task=text_only)
        answer = await pair.decoder.stub.Generate(request, timeout=SECONDS)
        assert time.monotonic() - started < TIMEOUT_SECONDS  # nobody was waited for
    finally:
        if fault == "stopped":
            store.mend(fault)
    assert answer.text
    assert pair.decoder.dials == []


@pytest.fixture
def dead_url() -> str:
    return f"redis://127.0.0.1:{free_port()}"


async def test_a_stream_is_offered_too(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, dead_url: str
) -> None:
    async with a_pair(preprocessor, prompts, dead_url) as pair:
        header = encoder_pb2.StreamEncodeHeader(
            modality=encoder_pb2.MODALITY_IMAGE, size_bytes=len(PICTURE), allow_hand_over=True
        )
        requests = [
            encoder_pb2.StreamEncodeRequest(header=header),
            encoder_pb2.StreamEncodeRequest(chunk=PICTURE),
        ]
        offered = (await pair.encoder.stub.StreamEncode(iter(requests), timeout=SECONDS)).feature
        assert (await pair.ask(offered)).summary.visual_tokens == offered.token_count


async def test_with_an_empty_list_nobody_is_asked(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, dead_url: str
) -> None:
    async with a_pair(preprocessor, prompts, dead_url, allowed="") as pair:
        offered = (await pair.encode()).feature
        assert (await failure_of(pair.ask(offered))).reason == "STORE_UNAVAILABLE"
        assert pair.decoder.dials == []


async def test_tokens_are_counted_from_the_manifest_alone(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, dead_url: str
) -> None:
    async with a_pair(preprocessor, prompts, dead_url) as pair:
        offered = (await pair.encode()).feature
        turns = question(offered.key, offered.source).turns
        request = decoder_pb2.CountTokensRequest(turns=turns)
        count = await pair.decoder.stub.CountTokens(request, timeout=SECONDS)
        assert count.visual_tokens == offered.token_count


# C12, C14
async def test_tenants_get_their_own_features_only(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, dead_url: str
) -> None:
    async with a_pair(preprocessor, prompts, dead_url) as pair:
        offered = (await pair.encode(tenant="mine")).feature
        await pair.ask(offered, tenant="mine")
        assert pair.decoder.dials == [pair.encoder.address]
        for tenant in ("theirs", ""):
            assert (await failure_of(pair.ask(offered, tenant=tenant))).reason == "FEATURE_NOT_FOUND"
            fetch = encoder_pb2.FetchFeaturesRequest(key=offered.key)
            missing = encoder_pb2.FetchFeaturesRequest(key=offered.key[:-4] + "0000")
            failures = [
                await failure_of(
                    pair.encoder.stub.FetchFeatures(request, timeout=SECONDS, metadata=_named(tenant))
                )
                for request in (fetch, missing)
            ]
            assert failures[0] == failures[1]
            assert (failures[0].code, failures[0].reason) == ("NOT_FOUND", "FEATURE_NOT_FOUND")


async def test_an_evicted_feature_is_not_handed_over(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, dead_url: str
) -> None:
    async with a_pair(preprocessor, prompts, dead_url) as pair:
        offered = (await pair.encode()).feature
        assert pair.encoder.harness.hand_over.forget(FeatureKey.parse(offered.key))
        assert (await failure_of(pair.ask(offered))).reason == "STORE_UNAVAILABLE"


async def test_bad_keys_are_refused_by_their_field(
    preprocessor: ImagePreprocessor, prompts: PromptBuilder, dead_url: str
) -> None:
    async with a_pair(preprocessor, prompts, dead_url) as pair:
        call = pair.encoder.stub.FetchFeatures(encoder_pb2.FetchFeaturesRequest(key="a\r\n"), timeout=SECONDS)
        failure = await failure_of(call)
        assert (failure.code, failure.reason, failure.field) == (
            "INVALID_ARGUMENT",
            "MALFORMED_FEATURE_KEY",
            "key",
        )
        alone = task([decoder_pb2.Part(text="x", feature_source="a:1/b")])
        refused = await failure_of(
            pair.decoder.stub.Generate(decoder_pb2.GenerateRequest(task=alone), timeout=SECONDS)
        )
        assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "task.turns[0].parts[0].feature_source")
