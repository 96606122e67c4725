"""Metrics of the machine: CPU, memory, disks and network from /proc, and its GPUs as sampled by the agent.

Values that a GPU does not report (a partition, an old driver) are left out, never 0.
"""

import os
from pathlib import Path

from stallscope.events.layout import UNKNOWN, Array
from stallscope.exporters import metric_table as table_of
from stallscope.exporters.metric_table import Metric
from stallscope.exporters.metric_values import Meter, Values

_CPU_MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "interrupt", "steal")
"""Columns of /proc/stat (proc_stat(5)) under the names of the conventions; irq and softirq are both interrupts."""

_SECTOR_BYTES = 512
"""The unit of /proc/diskstats, independent of the device's sector size."""

_VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md")

THROTTLE_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "hardware_power_brake",
}
"""nvmlClocksEventReason* bits that hold a clock down; idle and application settings do not count as throttling."""


def read_machine(meter: Meter, proc: Path = Path("/proc")) -> None:
    """Read /proc once. The metrics of a missing file are left out."""
    for read in (_cpu, _memory, _disks, _network):
        try:
            read(meter, proc)
        except (OSError, ValueError, IndexError):
            continue


def boot_wall_ns(proc: Path = Path("/proc")) -> int:
    """The boot time of the machine; 0 if /proc/stat does not report it."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return 0
    boot_times = [line.split()[1] for line in lines if line.startswith("btime ")]
    return int(boot_times[0]) * 10**9 if boot_times else 0


def _cpu(meter: Meter, proc: Path) -> None:
    ticks = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
    total: dict[str, float] = {}
    for mode, value in zip(_CPU_MODES, ticks, strict=False):
        total[mode] = total.get(mode, 0.0) + int(value) / os.sysconf("SC_CLK_TCK")
    for mode, seconds in total.items():
        meter.set(table_of.CPU_TIME, seconds, mode)


def _memory(meter: Meter, proc: Path) -> None:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    states = {"free": kib["MemFree"], "buffers": kib["Buffers"], "cached": kib["Cached"]}
    states["used"] = kib["MemTotal"] - sum(states.values())
    for state, value in states.items():
        meter.set(table_of.MEMORY_USAGE, value * 1024, state)
    meter.set(table_of.MEMORY_LIMIT, kib["MemTotal"] * 1024)


def _disks(meter: Meter, proc: Path) -> None:
    """Whole disks only: bytes written to a partition are counted for its disk."""
    rows = [line.split() for line in (proc / "diskstats").read_text().splitlines()]
    names = {words[2] for words in rows}
    for words in rows:
        name = words[2]
        is_part = any(name != other and name.startswith(other) for other in names)
        if is_part or name.startswith(_VIRTUAL_DISKS):
            continue
        meter.set(table_of.DISK_IO, int(words[5]) * _SECTOR_BYTES, name, "read")
        meter.set(table_of.DISK_IO, int(words[9]) * _SECTOR_BYTES, name, "write")


def _network(meter: Meter, proc: Path) -> None:
    for line in (proc / "net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        words = counts.split()
        meter.set(table_of.NETWORK_IO, int(words[0]), name.strip(), "receive")
        meter.set(table_of.NETWORK_IO, int(words[8]), name.strip(), "transmit")


def set_gpu_metrics(meter: Meter, gpus: Array) -> None:
    """Set the metrics of every GPU and partition. gpus: rows of GPUS, one for each."""
    numbers_by_metric: dict[Metric, dict[Values, float]] = {metric: {} for metric in _GPU_METRICS}
    for row in gpus:
        identity = (row["uuid"].decode(), row["name"].decode(), "NVIDIA")
        for name, metric, more, factor in _GAUGES:
            if row[name] != UNKNOWN:
                numbers_by_metric[metric][(*identity, *more)] = float(row[name]) * factor
        if row["clock_reasons"] != UNKNOWN:
            for bit, reason in THROTTLE_REASONS.items():
                numbers_by_metric[table_of.GPU_THROTTLED][(*identity, reason)] = float(
                    bool(row["clock_reasons"] & bit)
                )
    for metric, numbers in numbers_by_metric.items():
        meter.replace(metric, numbers)


_GAUGES: tuple[tuple[str, Metric, Values, float], ...] = (
    ("utilization_percent", table_of.GPU_UTILIZATION, (), 0.01),
    ("memory_used_bytes", table_of.GPU_MEMORY_USAGE, (), 1.0),
    ("memory_total_bytes", table_of.GPU_MEMORY_LIMIT, (), 1.0),
    ("temperature_celsius", table_of.TEMPERATURE, ("gpu",), 1.0),
    ("power_mw", table_of.POWER, ("gpu",), 0.001),
    ("sm_mhz", table_of.GPU_CLOCK, (), 1e6),
    ("n_ecc_corrected", table_of.GPU_ERRORS, ("corrected_ecc",), 1.0),
    ("n_ecc_uncorrected", table_of.GPU_ERRORS, ("uncorrected_ecc",), 1.0),
    ("n_nvlink_errors", table_of.GPU_ERRORS, ("nvlink",), 1.0),
)
"""Column, metric, its further attributes, and the factor from the column's unit to the metric's unit."""

_GPU_METRICS = (*dict.fromkeys(metric for _, metric, _, _ in _GAUGES), table_of.GPU_THROTTLED)
