"""What a running decoder says of itself, read from its Prometheus end point."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

SECONDS = 5.0


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
