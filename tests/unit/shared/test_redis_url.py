"""Store URLs of all kinds: what is understood, what is refused, and that nothing is given away."""

import pytest
from redis.connection import SSLConnection, UnixDomainSocketConnection

from shared.store.redis_url import InvalidStoreUrl, StoreKind, parse_store_url


def test_one_server() -> None:
    url = parse_store_url("redis://reader:s3cret@store:6380/2")
    assert url.kind is StoreKind.SERVER
    expected = {"host": "store", "port": 6380, "db": 2, "username": "reader", "password": "s3cret"}
    assert url.options == expected


def test_a_unix_socket() -> None:
    options = parse_store_url("unix://:s3cret@/run/redis.sock?db=1").options
    expected = {"path": "/run/redis.sock", "db": 1, "password": "s3cret"}
    assert options == expected | {"connection_class": UnixDomainSocketConnection}


def test_sentinel() -> None:
    url = parse_store_url(
        "redis+sentinel://reader:s3cret@a:1,b,[::1]:3/my%20master/2?sentinel_password=other"
    )
    assert url.kind is StoreKind.SENTINEL
    assert url.addresses == (("a", 1), ("b", 26379), ("::1", 3))
    assert url.master_name == "my master"
    assert url.options == {"username": "reader", "password": "s3cret", "db": 2}
    assert url.sentinel_options == {"password": "other", "ssl": False}


def test_sentinel_with_tls() -> None:
    url = parse_store_url("rediss+sentinel://a/m?ssl_ca_certs=/ca.pem")
    assert url.options == {"connection_class": SSLConnection, "ssl_ca_certs": "/ca.pem"}
    assert url.sentinel_options == {"ssl": True, "ssl_ca_certs": "/ca.pem"}


def test_cluster() -> None:
    url = parse_store_url("redis+cluster://:s3cret@a,b:7001")
    assert url.kind is StoreKind.CLUSTER
    assert url.addresses == (("a", 6379), ("b", 7001))
    assert url.options == {"password": "s3cret"}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://store",
        "redis+sentinel://a:26379",
        "redis+sentinel:///master",
        "redis+sentinel://a:port/master",
        "redis+sentinel://a,,b/master",
        "redis+sentinel://a/master/second/third",
        "redis+server://a",
        "unix+cluster://a",
        "redis+cluster://a/1",
        "redis+cluster://a?sentinel_password=x",
        "redis+cluster://a?decode_responses=true",
        "redis://a?sentinel_password=x",
        "redis://a?socket_timeout=1",
        "redis+",
        "redis://a/first",
    ],
)
def test_refused(url: str) -> None:
    with pytest.raises(InvalidStoreUrl):
        parse_store_url(url)


@pytest.mark.parametrize("url", ["redis+sentinel://u:s3cret@a", "redis://u:s3cret@a?socket_timeout=1"])
def test_secrets_stay_secret(url: str) -> None:
    with pytest.raises(InvalidStoreUrl) as caught:
        parse_store_url(url)
    assert "s3cret" not in repr(caught.value)
    assert "s3cret" not in repr(parse_store_url("redis://u:s3cret@a"))
