"""Numbers that parts of the hub keep for themselves, as Prometheus wants them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Numbers = Callable[[], Mapping[str, float]]
_GAUGES = ("queue_", "longest_", "uptime_", "hot_", "n_")
"""Beginnings of names whose numbers may fall; the others only grow."""


def expose(registry: CollectorRegistry, prefix: str, numbers: Numbers) -> None:
    """Have /metrics ask `numbers` each time; a name becomes `<prefix>_<name>`, with `_total` where it only grows."""
    registry.register(_Asked(prefix, numbers))


@dataclass(frozen=True)
class _Asked:
    """What the registry calls a collector."""

    prefix: str
    numbers: Numbers

    def describe(self) -> list[Any]:
        """Nothing to tell before it is asked."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family for each number."""
        for name, value in sorted(self.numbers().items()):
            family = GaugeMetricFamily if name.startswith(_GAUGES) else CounterMetricFamily
            text = name.replace("_", " ")
            yield family(f"{self.prefix}_{name}", f"The hub's {text}.", value=float(value))
