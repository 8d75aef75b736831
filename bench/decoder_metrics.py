"""What a running decoder says of itself, read from its Prometheus end point."""

import asyncio
import time
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

SECONDS = 5.0
_IN_USE = (
    "lenspair_decoder_requests_running",
    "lenspair_decoder_requests_waiting",
    "lenspair_decoder_kv_blocks_used",
)


class DecoderMetrics:
    """The metrics of one decoder: by name, labels summed up, and by name{label=value} for each label."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def read(self) -> Mapping[str, float]:
        with urllib.request.urlopen(self._url, timeout=SECONDS) as response:  # noqa: S310  our own process
            text = response.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labelled = [f"{sample.name}{{{name}={value}}}" for name, value in sample.labels.items()]
                for key in (sample.name, *labelled):
                    values[key] = values.get(key, 0.0) + sample.value
        return values

    async def is_empty_within(self, seconds: float) -> bool:
        """Whether nobody runs or waits and no block is lent, soon enough."""
        until = time.monotonic() + seconds
        while any(self.read()[name] for name in _IN_USE):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.02)
        return True
