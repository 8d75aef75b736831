"""Sources: only holders of the store key write them, for one address and one feature."""

import pytest

from shared.features.source import Address, SourceSeal
from tests.feature_samples import make_key

STORE_KEY = b"a store key"
ADDRESS = Address("10.0.0.7", 50051)
KEY = make_key("a")


@pytest.fixture
def seal() -> SourceSeal:
    return SourceSeal(STORE_KEY)


# Encoders and decoders of different ages must agree on every bit of it.
def test_the_form_of_a_source(seal: SourceSeal) -> None:
    assert seal.close(ADDRESS, KEY) == (
        "10.0.0.7:50051/2a388eb84e24c0d09bd4a4e7101412da7eee5261ce0fe8b7598941055f959084"
    )


@pytest.mark.parametrize(
    "address",
    [
        ADDRESS,
        Address("encoder-0.encoder.svc", 1),
        Address("fd00::7", 65_535),
        Address(".".join(["a" * 63] * 3 + ["a" * 61]), 65_535),  # the longest
    ],
)
def test_what_was_closed_can_be_opened(seal: SourceSeal, address: Address) -> None:
    assert SourceSeal(STORE_KEY).open(seal.close(address, KEY), KEY) == address


def test_a_source_holds_for_one_feature(seal: SourceSeal) -> None:
    source = seal.close(ADDRESS, KEY)
    assert seal.open(source, make_key("b")) is None
    assert seal.open(source, make_key("a", tenant="5")) is None


def test_a_source_of_another_store_key_is_refused(seal: SourceSeal) -> None:
    assert seal.open(SourceSeal(b"another key").close(ADDRESS, KEY), KEY) is None


def test_no_character_of_a_source_can_be_changed(seal: SourceSeal) -> None:
    source = seal.close(ADDRESS, KEY)
    for index, character in enumerate(source):
        other = "1" if character != "1" else "2"
        assert seal.open(source[:index] + other + source[index + 1 :], KEY) is None
        assert seal.open(source[:index] + source[index + 1 :], KEY) is None
        assert seal.open(source[:index] + other + source[index:], KEY) is None


@pytest.mark.parametrize(
    "source", ["", "/", "10.0.0.7:50051", "10.0.0.7:50051/", "\x00/\ud7ff", "ß/ß", "a" * 99_999]
)
def test_anything_else_is_no_source(seal: SourceSeal, source: str) -> None:
    assert seal.open(source, KEY) is None


def test_the_tag_is_not_one_of_the_store(seal: SourceSeal) -> None:
    """The derived key has a label of its own: seals of manifests are no tags."""
    from shared.features.seal import ForgerySeal

    framed = b"".join(len(part).to_bytes(8, "big") + part for part in (b"10.0.0.7:50051", str(KEY).encode()))
    sealed = ForgerySeal(STORE_KEY).close(framed)
    assert seal.open(f"10.0.0.7:50051/{sealed[-32:].hex()}", KEY) is None


def test_an_empty_store_key_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        SourceSeal(b"")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.7:50051", "10.0.0.7", 50051),
        ("Encoder-0.Encoder.svc:1", "encoder-0.encoder.svc", 1),
        ("[FD00:0::7]:65535", "fd00::7", 65_535),
        ("3f2a:50051", "3f2a", 50051),
    ],
)
def test_an_address_has_one_spelling(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        ":1",
        "a:",
        "a:0",
        "a:65536",
        "a:1\n",
        "a b:1",
        "a_b:1",
        "-a:1",
        "a-:1",
        "a..b:1",
        "a.:1",
        f"{'a' * 64}:1",
        f"{'a.' * 127}a:1",
        "unix:/run/x:1",
        "dns:///a:1",
        "user@a:1",
        "a/b:1",
        "::1:5",
        "[::1]",
        "[::1%eth0]:5",
        "[10.0.0.7]:5",
        "[a]:5",
        # spellings of 127.0.0.1 that resolvers know
        "127.1:5",
        "2130706433:5",
        "0x7f.1:5",
        "0x7f000001:5",
        "0177.0.0.1:5",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|port"):
        Address.parse(text)
