"""Exposes the counters and gauges of hub components to Prometheus."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Numbers = Callable[[], Mapping[str, float]]
_GAUGES = re.compile(r"(queue|longest|uptime|hot|n|nodes|diagnosis_lag|clock_ahead)_|.*_under_way$")
"""Names of gauges; all other names are counters."""


def expose(registry: CollectorRegistry, prefix: str, numbers: Numbers) -> None:
    """Let /metrics call `numbers` on each scrape. Names become `<prefix>_<name>`, with `_total` for counters."""
    registry.register(_Collector(prefix, numbers))


def expose_slots(
    registry: CollectorRegistry, prefix: str, numbers: Callable[[], Mapping[int, Mapping[str, float]]]
) -> None:
    """Let /metrics call `numbers` on each scrape: gauges by slot."""
    registry.register(_SlotCollector(prefix, numbers))


@dataclass(frozen=True)
class _SlotCollector:
    """As _Collector, with the label slot."""

    prefix: str
    numbers: Callable[[], Mapping[int, Mapping[str, float]]]

    def describe(self) -> list[Any]:
        """Empty: the names are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        """One metric family per number, with a sample per slot."""
        families: dict[str, GaugeMetricFamily] = {}
        for slot, numbers in sorted(self.numbers().items()):
            for name, value in numbers.items():
                text = f"The {name.replace('_', ' ')} of a slot of this hub."
                family = families.setdefault(
                    name, GaugeMetricFamily(f"{self.prefix}_{name}", text, labels=["slot"])
                )
                family.add_metric([str(slot)], float(value))
        yield from families.values()


@dataclass(frozen=True)
class _Collector:
    """The collector interface that the registry expects."""

    prefix: str
    numbers: Numbers

    def describe(self) -> list[Any]:
        """Empty: the names are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Any]:
        """One metric family per number."""
        for name, value in sorted(self.numbers().items()):
            family = GaugeMetricFamily if _GAUGES.match(name) else CounterMetricFamily
            text = name.replace("_", " ")
            yield family(f"{self.prefix}_{name}", f"The hub's {text}.", value=float(value))
