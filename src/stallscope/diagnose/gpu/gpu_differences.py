"""Differences between the driver's readings of a slow GPU and of the job's other GPUs, as evidence for its verdict.

A difference alone does not make a verdict: it shows in which property the slow GPU differs from its peers.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import known_mean
from stallscope.events.layout import UNKNOWN, Array

_LEVELS = (  # column, name, unit, factor to the unit, minimum difference in the unit, minimum share of the peers' value
    ("sm_mhz", "SM clock", "MHz", 1.0, 50.0, 0.05),
    ("memory_mhz", "memory clock", "MHz", 1.0, 50.0, 0.05),
    ("utilization_percent", "utilisation", "%", 1.0, 10.0, 0.1),
    ("power_mw", "power", "W", 1e-3, 30.0, 0.1),
    ("temperature_celsius", "temperature", "degrees", 1.0, 10.0, 0.1),
    ("pcie_generation", "PCIe generation", "", 1.0, 0.5, 0.0),
    ("pcie_width", "PCIe lanes", "", 1.0, 0.5, 0.0),
    ("n_nvlinks_up", "NVLinks up", "", 1.0, 0.5, 0.0),
)
_COUNTER_LEVELS = (
    ("sm_percent", "multiprocessors at work", "%", 1.0, 10.0, 0.1),
    ("tensor_percent", "use of tensor cores", "%", 1.0, 10.0, 0.1),
    ("memory_percent", "use of memory bandwidth", "%", 1.0, 10.0, 0.1),
    ("pcie_sent_bytes_per_s", "sent over PCIe", "MB/s", 1e-6, 100.0, 0.2),
    ("pcie_received_bytes_per_s", "received over PCIe", "MB/s", 1e-6, 100.0, 0.2),
    ("nvlink_sent_bytes_per_s", "sent over NVLink", "MB/s", 1e-6, 100.0, 0.2),
    ("nvlink_received_bytes_per_s", "received over NVLink", "MB/s", 1e-6, 100.0, 0.2),
)
_COUNTS = (
    ("n_ecc_corrected", "corrected memory errors"),
    ("n_ecc_uncorrected", "uncorrected memory errors"),
    ("n_nvlink_errors", "NVLink errors"),
)


LINKS = frozenset(
    {
        *("pcie_generation", "pcie_width", "n_nvlinks_up", "n_nvlink_errors"),
        *("nvlink_sent_bytes_per_s", "nvlink_received_bytes_per_s"),
    }
)
"""Columns that show the state of a GPU's links."""


@dataclass(frozen=True)
class Readings:
    """The readings of one GPU. rows: all, for counts; during: those that apply in the period of a verdict, each for the
    time in weight. counters: the rows of GPU_COUNTERS, with the part of that period that each covers.
    """

    rows: Array
    during: Array
    weight: Array
    counters: Array
    covered_ns: Array


@dataclass(frozen=True)
class Compared:
    """The readings of a GPU, as text. unlike: those that differ from the median of its peers. other: all others."""

    unlike: list[str]
    other: list[str]


def compared(own: Readings, others: list[Readings], columns: Collection[str] | None = None) -> Compared:
    """Compares the known readings of a GPU with its peers. In a job with one GPU, no reading differs.

    columns: only these columns.
    """
    unlike, other = [], []
    for levels, level in ((_LEVELS, _level), (_COUNTER_LEVELS, _counter_level)):
        for column, name, unit, factor, least, least_share in levels:
            if columns is not None and column not in columns:
                continue
            value, peers = level(own, column), [level(each, column) for each in others]
            known = [peer * factor for peer in peers if peer is not None]
            if value is None:
                continue
            reading = f"{name} {value * factor:.0f} {unit}".strip()
            typical = float(np.median(known)) if known else value * factor
            if abs(value * factor - typical) >= max(least, least_share * typical):
                unlike.append(f"{reading}, other GPUs {typical:.0f}")
            else:
                other.append(reading)
    for column, name in _COUNTS:
        if columns is not None and column not in columns:
            continue
        grown = _growth(own.rows, column)
        if grown is None:
            continue
        known = [peer for each in others if (peer := _growth(each.rows, column)) is not None]
        typical = float(np.median(known)) if known else float(grown)
        if grown > typical:
            unlike.append(f"{name} +{grown}, other GPUs +{typical:.0f}")
        else:
            other.append(f"{name} +{grown}")
    return Compared(unlike, other)


def _level(readings: Readings, column: str) -> float | None:
    return known_mean(readings.during[column], readings.weight)


def _counter_level(readings: Readings, column: str) -> float | None:
    return known_mean(readings.counters[column], readings.covered_ns)


def _growth(rows: Array, column: str) -> int | None:
    known = rows[column][rows[column] != UNKNOWN]
    return int(known.max() - known.min()) if len(known) else None
