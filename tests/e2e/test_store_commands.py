"""An operator looks after the store of a running pair: `lenspair store`, and what callers see of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from demo.pair import Pair
from lenspair_client import FeatureNotFound, LenspairClient, Turn

PICTURE = Path("demo/samples/red-circle.png")


def lenspair(pair: Pair, *arguments: object) -> Any:
    """The one line of JSON that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "lenspair_client", *map(str, arguments), "--json"],
        env=os.environ | {"LENSPAIR_ENCODER": pair.encoder.address, "LENSPAIR_DECODER": pair.decoder.address},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_feature_is_kept_looked_at_and_evicted(pair: Pair) -> None:
    with (
        redis.Redis.from_url(pair.store_url) as store,
        LenspairClient(pair.encoder.address, pair.decoder.address) as client,
    ):
        store.flushall()
        key = lenspair(pair, "encode", PICTURE)["key"]
        feature = client.encode(PICTURE)
        turns = [Turn("user", (feature, "What colour is the shape?"))]
        assert client.generate(turns).text == "red"
        lenspair(pair, "store", "keep", key, "--for", "2h")
        lives = [store.ttl(name) for name in store.scan_iter(f"lenspair:{{{key}}}:*")]
        assert len(lives) >= 3
        assert min(lives) > 7000
        shown = lenspair(pair, "store", "show", key)
        assert (shown["stored"], shown["token_count"]) == (True, feature.token_count)
        stats = lenspair(pair, "store", "stats")
        assert (stats["entries"], stats["size_bytes"]) == (1, feature.size_bytes)
        assert stats["requests"]["hits"] >= 1
        assert stats["store_used_bytes"] > 0
        assert lenspair(pair, "store", "evict", key)["existed"] is True
        assert list(store.scan_iter(f"lenspair:{{{key}}}:*")) == []
        with pytest.raises(FeatureNotFound):  # the decoder's prefix cache knows it still
            client.generate(turns)
