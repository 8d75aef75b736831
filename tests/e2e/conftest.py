"""The whole pair as processes on the demonstration checkpoint, once for all tests that leave it healthy."""

from collections.abc import Iterator

import pytest

from demo.pair import Pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    with Pair(environment={"LENSPAIR_REFLECTION": "true"}) as running:
        yield running
