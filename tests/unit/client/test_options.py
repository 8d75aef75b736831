"""What channels are told; gRPC ignores names that it does not know, and reads a config at the first call."""

import json
from typing import Any

import grpc
import pytest

from lenspair_client.options import (
    DECODER_SERVICE,
    ENCODER_SERVICE,
    ClientOptions,
    channel_options,
    check_timeout,
    service_config,
)
from shared.pb.lenspair.decoder.v1 import decoder_pb2
from shared.pb.lenspair.encoder.v1 import encoder_pb2

SERVICES = {
    ENCODER_SERVICE: encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"],
    DECODER_SERVICE: decoder_pb2.DESCRIPTOR.services_by_name["DecoderService"],
}


def code_at_first_call(config: str) -> tuple[grpc.StatusCode, str]:
    """Where no server is, a good config ends in UNAVAILABLE for that reason."""
    options = [("grpc.service_config", config)]
    with grpc.insecure_channel("127.0.0.1:1", options) as channel:
        call: Any = channel.unary_unary(f"/{ENCODER_SERVICE}/Encode")
        with pytest.raises(grpc.RpcError) as error:
            call(b"", timeout=5)
    failed: Any = error.value
    return failed.code(), failed.details()


@pytest.mark.parametrize("service", SERVICES)
def test_grpc_reads_the_service_config(service: str) -> None:
    code, details = code_at_first_call(service_config(service))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "Connection refused" in details


def test_a_bad_service_config_would_be_noticed() -> None:
    bad = service_config(ENCODER_SERVICE).replace('"round_robin"', '"nobody"')
    _, details = code_at_first_call(bad)
    assert "Connection refused" not in details


@pytest.mark.parametrize("service", SERVICES)
def test_names_are_those_of_the_contracts(service: str) -> None:
    assert SERVICES[service].full_name == service
    config = json.loads(service_config(service))
    assert config["healthCheckConfig"] == {"serviceName": service}


@pytest.mark.parametrize("service", SERVICES)
def test_grpc_repeats_nothing_by_itself(service: str) -> None:
    """persistence.py does, which knows the request's time and counts."""
    assert "methodConfig" not in json.loads(service_config(service))


def test_messages_have_the_servers_limit() -> None:
    options = dict(channel_options(ENCODER_SERVICE, ClientOptions(max_message_bytes=5_000_000)))
    assert options["grpc.max_send_message_length"] == 5_000_000
    assert options["grpc.max_receive_message_length"] == 5_000_000


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e17, float("inf"), float("nan")])
def test_a_timeout_ends(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        check_timeout(seconds)
    with pytest.raises(ValueError, match="finite"):
        ClientOptions(timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_patience_is_not_negative(seconds: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        ClientOptions(patience_seconds=seconds)


@pytest.mark.parametrize("pair", [("X-Upper", "a"), ("", "a"), ("x-a", "\n"), ("x-a", "é"), ("x-bin", "a")])
def test_metadata_that_no_call_can_carry_is_refused_before_any(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        ClientOptions(metadata=(pair,))
    assert ClientOptions(metadata=(("x-tenant", "the shop"),)).metadata
