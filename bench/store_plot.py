"""Draws the speeds of the feature store by size."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from bench.store_speed import Speeds, Way

_LINES = (("ceiling", "bare socket", ":"), ("ours", "Lenspair", "-"), ("redis_py", "redis-py", "--"))


def plot(tables: Mapping[str, Mapping[Way, Mapping[int, Speeds]]], path: Path) -> None:
    """Writes a PNG with one panel for each kind of connection and way."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    panels = figure.subplots(len(tables), 3, sharex=True, squeeze=False)
    for row, (name, table) in zip(panels, tables.items(), strict=True):
        for panel, (way, sizes) in zip(row, table.items(), strict=True):
            for field, label, style in _LINES:
                values = [getattr(speeds, field) / 1000 for speeds in sizes.values()]
                panel.plot(list(sizes), values, style, marker="o", label=label)
            panel.set(title=f"{way} through {name}", xscale="log", xticks=list(sizes), ylabel="GB/s")
            panel.set_xticklabels([f"{size} MiB" for size in sizes])
            panel.set_ylim(bottom=0)
            panel.minorticks_off()
    panels[0][0].legend()
    figure.savefig(path, dpi=120)
