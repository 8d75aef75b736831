"""Backends and features for the conformance suites."""

from collections.abc import AsyncIterator, Iterator

import pytest

from demo.embedded_store import EmbeddedStore
from shared.store.store import FeatureStore
from tests.contract.backends import Backend, MemoryBackend, RedisBackend, Wrap, bare, cached
from tests.redis_servers import SERVER_KINDS, start_server


@pytest.fixture(scope="session", params=["memory", *SERVER_KINDS])
def shared_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedStore | None]:
    """One server of each kind for the whole session; None for the memory store."""
    if request.param == "memory":
        yield None
        return
    with start_server(request.param) as server:
        yield server


@pytest.fixture(params=[bare, cached], ids=["bare", "cached"])
async def backend(
    shared_server: EmbeddedStore | None, request: pytest.FixtureRequest
) -> AsyncIterator[Backend]:
    """An empty place for features: memory, the embedded server, Debian's server; bare, and behind a cache."""
    backend = an_empty_place(shared_server, request.param)
    yield backend
    await backend.close()


@pytest.fixture
async def store(backend: Backend) -> AsyncIterator[FeatureStore]:
    """A store on the backend."""
    store = backend.open()
    yield store
    await store.close()


@pytest.fixture
async def cached_backend(shared_server: EmbeddedStore | None) -> AsyncIterator[Backend]:
    """An empty place for features, all stores of which have a process cache."""
    backend = an_empty_place(shared_server, cached)
    yield backend
    await backend.close()


def an_empty_place(server: EmbeddedStore | None, wrap: Wrap) -> Backend:
    return MemoryBackend(wrap) if server is None else RedisBackend(server.url, wrap)


@pytest.fixture(params=SERVER_KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedStore]:
    """A real server of this test's own, to be stopped, filled or killed."""
    with start_server(request.param) as server:
        yield server


@pytest.fixture
async def redis_backend(server: EmbeddedStore) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(server.url)
    yield backend
    await backend.client.aclose()
