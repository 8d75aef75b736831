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
    bad = service_config(ENCODER_SERVICE).replace('"0.1s"', '"soon"')
    _, details = code_at_first_call(bad)
    assert "Connection refused" not in details


@pytest.mark.parametrize("service", SERVICES)
def test_names_are_those_of_the_contracts(service: str) -> None:
    assert SERVICES[service].full_name == service
    config = json.loads(service_config(service))
    assert config["healthCheckConfig"] == {"serviceName": service}
    methods = [name for method in config.get("methodConfig", ()) for name in method["name"]]
    assert all(name["method"] in SERVICES[name["service"]].methods_by_name for name in methods)


def test_what_costs_a_whole_answer_is_never_repeated_by_grpc() -> None:
    assert "methodConfig" not in json.loads(service_config(DECODER_SERVICE))
    (config,) = json.loads(service_config(ENCODER_SERVICE))["methodConfig"]
    unary = {method.name for method in SERVICES[ENCODER_SERVICE].methods} - {"StreamEncode", "FetchFeatures"}
    assert {name["method"] for name in config["name"]} == unary
    assert config["retryPolicy"]["maxAttempts"] == 4
    assert config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


def test_the_retry_buffer_holds_the_largest_picture() -> None:
    options = dict(channel_options(ENCODER_SERVICE, ClientOptions(max_message_bytes=5_000_000)))
    assert options["grpc.per_rpc_retry_buffer_size"] == 5_000_000
    assert options["grpc.max_send_message_length"] == 5_000_000
    assert options["grpc.max_receive_message_length"] == 5_000_000


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_ends(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        check_timeout(seconds)
    with pytest.raises(ValueError, match="finite"):
        ClientOptions(timeout_seconds=seconds)
