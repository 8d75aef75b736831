"""`buf curl` with reflection lists and calls both services, as a person would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.pair import Pair

BUF = Path(sys.executable).with_name("buf")


def _buf_curl(*arguments: str) -> str:
    command = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize(("name", "service"), [("encoder", "EncoderService"), ("decoder", "DecoderService")])
def test_services_are_listed(pair: Pair, name: str, service: str) -> None:
    address = getattr(pair, name).address
    listed = _buf_curl(f"http://{address}", "--list-services").split()
    assert f"lenspair.{name}.v1.{service}" in listed
    assert "grpc.health.v1.Health" in listed


def test_the_decoder_is_called(pair: Pair) -> None:
    task = {"turns": [{"role": "ROLE_USER", "parts": [{"text": "Say hello."}]}], "maxOutputTokens": 8}
    output = _buf_curl(
        "--data",
        json.dumps({"task": task}),
        f"http://{pair.decoder.address}/lenspair.decoder.v1.DecoderService/Generate",
    )
    assert json.loads(output)["summary"]["inputTokens"] > 0


def test_the_encoder_is_called(pair: Pair) -> None:
    query = {"modality": "MODALITY_IMAGE", "sha256": "A" * 43 + "="}
    output = _buf_curl(
        "--data",
        json.dumps({"queries": [query]}),
        f"http://{pair.encoder.address}/lenspair.encoder.v1.EncoderService/LookupFeatures",
    )
    assert json.loads(output) == {"results": [{}]}
