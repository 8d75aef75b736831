"""TLS with a real handshake, against Debian's server: commands and chunks both go through it."""

import asyncio
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.ports import free_port
from shared.errors import StoreUnavailable
from tests.contract.backends import RedisBackend
from tests.contract.test_redis_store import KEY, check_reads, megabytes
from tests.feature_samples import make_bundle, make_key, same_bytes
from tests.redis_servers import start_server


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signed itself; its key lies beside it."""
    if (program := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    options = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=store",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(
        [program, "req", "-x509", *options, *names, *files],
        check=True,
        capture_output=True,
    )
    return tmp_path / "cert.pem"


@pytest.fixture
def address(certificate: Path) -> Iterator[str]:
    port = free_port()
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(certificate),
        "tls-key-file": str(certificate.with_name("key.pem")),
        "tls-ca-cert-file": str(certificate),
        "tls-auth-clients": "no",
    }
    with start_server("redis", options):
        yield f"rediss://127.0.0.1:{port}"


async def test_features_travel_over_tls(address: str, certificate: Path) -> None:
    store = RedisBackend(address).open(url=f"{address}?ssl_ca_certs={certificate}", chunk_bytes=1 << 20)
    await store.put(KEY, make_bundle())
    await check_reads(store)
    large = megabytes(9)
    large.tensor.uniform_(-3, 3)
    manifest = (await store.put(KEY, large)).manifest
    for _ in range(3):
        fetched = await store.fetch(manifest)
        assert fetched is not None
        assert same_bytes(fetched.tensor, large.tensor)
    await store.close()


async def test_reads_that_are_cancelled_anywhere_in_a_tls_stream_disturb_no_other(
    address: str, certificate: Path
) -> None:
    store = RedisBackend(address).open(
        url=f"{address}?ssl_ca_certs={certificate}", chunk_bytes=1 << 19, connections=2
    )
    manifests = []
    for number, name in enumerate("ab"):
        bundle = megabytes(3)
        bundle.tensor.fill_(number + 1)
        manifests.append((await store.put(make_key(name), bundle)).manifest)
    randomness = random.Random(13)
    for _ in range(60):
        cancelled = asyncio.create_task(store.fetch(manifests[0]))
        await asyncio.sleep(randomness.uniform(0, 0.02))
        cancelled.cancel()
        found = await store.fetch(manifests[1])
        await asyncio.gather(cancelled, return_exceptions=True)
        assert found is not None
        assert bool((found.tensor == 2).all())
    await store.close()


async def test_a_server_without_a_trusted_certificate_is_refused(address: str) -> None:
    store = RedisBackend(address).open(url=address)
    with pytest.raises(StoreUnavailable):
        await store.ping()
    with pytest.raises(StoreUnavailable):
        await store.put(KEY, make_bundle())
    await store.close()
