"""The user that the README tells operators to make may do all that the services do, and nothing else."""

import asyncio
import re
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from shared.errors import StoreUnavailable
from shared.store.redis_lease import open_leases
from tests.contract.backends import RedisBackend
from tests.feature_samples import make_bundle, make_key, same_bytes

KEY = make_key("a")
README = Path(__file__).parents[2] / "README.md"


async def make_user(backend: RedisBackend) -> str:
    """Makes the README's user; the URL to connect with as that user."""
    found = re.search(r"^ACL SETUSER lenspair (.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    rules = found[1].replace(">PASSWORD", ">s3cret").split()
    await backend.client.execute_command("ACL", "SETUSER", "lenspair", *rules)
    return f"unix://lenspair:s3cret@{backend.url.removeprefix('unix://')}"


async def test_it_may_do_all_that_is_done_with_features(redis_backend: RedisBackend) -> None:
    store = redis_backend.open(url=await make_user(redis_backend))
    await store.ping()
    await store.put(KEY, make_bundle(seed=1))
    manifest = (await store.put(KEY, make_bundle(seed=2))).manifest  # registers twice
    for name in await redis_backend.names():
        await redis_backend.set_seconds_left(name, 10)
    assert await store.look_up(KEY) is not None  # refreshes
    bundle = await store.fetch(manifest)
    assert bundle is not None
    assert same_bytes(bundle.tensor, make_bundle(seed=2).tensor)
    assert await store.keep_alive(KEY, 1000) is not None
    assert await store.describe(KEY) is not None
    survey = await store.survey(KEY.tenant)
    assert (survey.entries, survey.memory is not None) == (1, True)
    assert await store.delete(KEY)
    await store.put(KEY, make_bundle())
    await redis_backend.remove(next(name for name in await redis_backend.names() if ":c:" in name))
    assert await store.look_up(KEY) is None  # discards
    await store.close()


async def test_it_may_take_leases_and_hear_of_them(redis_backend: RedisBackend) -> None:
    url = await make_user(redis_backend)
    one, other = (open_leases(url=url, seconds=30, timeout_seconds=5) for _ in range(2))
    assert (await one.take(KEY, "one")).holder == "one"
    assert await one.renew(KEY, "one")
    with other.listening(KEY) as released:
        assert (await other.take(KEY, "other")).holder == "one"
        await asyncio.sleep(0.5)  # until it is subscribed
        assert await one.release(KEY, "one")
        await asyncio.wait_for(released.wait(), 5)
    for leases in (one, other):
        await leases.close()


async def test_it_may_do_nothing_else(redis_backend: RedisBackend) -> None:
    from redis.asyncio import Redis

    async with Redis.from_url(await make_user(redis_backend), protocol=2) as user:
        for command in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("GET", "of somebody else")):
            with pytest.raises(NoPermissionError):
                await user.execute_command(*command)


async def test_a_user_that_is_gone_is_a_typed_error(redis_backend: RedisBackend) -> None:
    store = redis_backend.open(url=await make_user(redis_backend))
    await store.put(KEY, make_bundle())
    await redis_backend.client.acl_deluser("lenspair")  # cuts its connections
    with pytest.raises(StoreUnavailable):
        await store.put(KEY, make_bundle())
    await store.close()
