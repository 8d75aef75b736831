"""The operator's list of encoders: names match names, networks match addresses, ports where given."""

import pytest

from decoder_service.allowed_sources import AllowedSources
from shared.features.source import Address


@pytest.mark.parametrize(
    ("entries", "address"),
    [
        ("encoder", "encoder:1"),
        ("Encoder", "encoder:1"),
        ("encoder:50051", "encoder:50051"),
        ("*.encoder.svc", "encoder-0.encoder.svc:1"),
        ("*.encoder.svc", "a.b.encoder.svc:1"),
        ("*.encoder.svc:7", "a.encoder.svc:7"),
        ("10.0.0.7", "10.0.0.7:1"),
        ("10.0.0.0/8", "10.255.255.255:1"),
        ("10.0.0.0/8:7", "10.0.0.1:7"),
        ("[fd00::7]", "[fd00:0::7]:1"),
        ("[fd00::]/8", "[fdff::1]:1"),
        ("[fd00::]/8:7", "[fd00::1]:7"),
        (" a , 10.0.0.0/8,, b:2 ", "b:2"),
    ],
)
def test_what_is_listed_is_allowed(entries: str, address: str) -> None:
    assert AllowedSources.parse(entries).allows(Address.parse(address))


@pytest.mark.parametrize(
    ("entries", "address"),
    [
        ("", "encoder:1"),
        ("encoder", "encoder2:1"),
        ("encoder", "a.encoder:1"),
        ("encoder:50051", "encoder:50052"),
        ("*.encoder.svc", "encoder.svc:1"),
        ("*.encoder.svc", "badencoder.svc:1"),
        ("*.encoder.svc", "a.encoder.svc.evil:1"),
        ("*.encoder.svc:7", "a.encoder.svc:8"),
        ("10.0.0.0/8", "11.0.0.1:1"),
        ("10.0.0.0/8:7", "10.0.0.1:8"),
        ("10.0.0.0/8", "ten.example:1"),
        ("10.0.0.0/8", "[::ffff:a00:1]:1"),
        ("[fd00::]/8", "10.0.0.1:1"),
        ("a,b:2", "b:3"),
    ],
)
def test_nothing_else_is(entries: str, address: str) -> None:
    assert not AllowedSources.parse(entries).allows(Address.parse(address))


def test_an_empty_list_is_off() -> None:
    assert not AllowedSources.parse(" , ")
    assert AllowedSources.parse("a")


@pytest.mark.parametrize(
    "entry",
    [
        "*",
        "*.",
        "*.10.0.0.1",
        "*.a/8",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "a/8",
        "fd00::/8",
        "a:0",
        "a b",
        "http://a",
        "a:b:c",
    ],
)
def test_what_can_not_be_read_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ValueError, match="'") as caught:
        AllowedSources.parse(f"good,{entry}")
    assert entry in str(caught.value)
