"""Timers that training frameworks print: Megatron-LM (timers, straggler detector), DeepSpeed, NVRx reports.

The phrases are from megatron/core/timers.py and StragglerDetector in megatron/core/utils.py (core 0.8 to 0.14),
deepspeed/utils/timer.py (0.14) and the straggler callback of nvidia-resiliency-ext (0.3). Timers that all ranks print
name the slow rank; a minimum and a maximum across ranks show that ranks differ, not which. Timers of communication are
left out: in these the rank that comes last waits least.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Gap
from stallscope.importers.rank_statements import Failure, Statements
from stallscope.importers.registry import Importer
from stallscope.importers.texts import lines_of

_WORDS = (
    *(
        b"time across ranks (ms)",
        b"times across ranks (ms)",
        b"MnRtt/Rnk",
        b"elapsed time per iteration (ms)",
    ),
    *(b"STRAGGLER DETECTION", b"rank=0 time (ms)", b"| fwd_microstep", b"relative performance"),
)
_RANK_TIME = re.compile(r"^ +rank +(\d+): +([\d.]+)")
_NAME = re.compile(r"^ +([\w\-/. ]+?):\s*$")
_MIN_MAX = re.compile(r"^ +([\w\-/]+) \.*: \(([\d.]+), ([\d.]+)\)")
_LOWEST = re.compile(r"MnEtpt/Rnk: ([\d.]+)TF/(\d+) \| MxEtpt/Rnk: ([\d.]+)TF/(\d+)")
_SCORE = re.compile(r"[Rr]ank=(\d+),? +[Nn]ode=\S+ +[Ss]core=([\d.]+)")
_AFFECTED = re.compile(r"worse (?:relative|individual) performance.*[Aa]ffected ranks: (.*)")
_STRAGGLER_RANK = re.compile(r"rank=(\d+)")
_DEEPSPEED = re.compile(r"\[Rank (\d+)\] time \(ms\) \| (.+)$|rank=(\d+) time \(ms\) \| (.+)$")
_COMMUNICATES = re.compile(
    r"sync|all-?reduce|all-?gather|reduce-?scatter|\brecv\b|\bsend\b|barrier", re.IGNORECASE
)
_CLEAR = 1.1  # a slow rank's timer exceeds the median by this factor
_SPREAD = 1.05
_LEAST_ROUNDS = 1


def _accepts(file: Path, head: bytes) -> bool:
    return any(word in head for word in _WORDS)


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the statements of the timers in some logs."""
    times: dict[str, dict[int, list[float]]] = {}
    ranges: dict[str, list[tuple[float, float]]] = {}
    for file in files:
        name = ""
        for line in lines_of(file):
            name = _take(line, name, times, ranges, statements)
    for name, by_rank in times.items():
        _compare(name, by_rank, statements)
    is_named = any(failure.kind == "slow" for failure in statements.failures)
    wide = {name: rows for name, rows in ranges.items() if _is_wide(rows) and not _COMMUNICATES.search(name)}
    for name, rows in wide.items():
        low, high = np.median(np.array(rows), axis=0)
        words = f"{name} takes {low:.1f} ms on the fastest rank and {high:.1f} ms on the slowest"
        statements.failures.append(Failure(UNKNOWN, "remark", words, 0))
    if not is_named:
        statements.gaps.append(
            Gap(
                "the timers show a minimum and a maximum across ranks, not which rank is slow"
                if ranges
                else "the timers show no rank that differs from the others",
                "Log with --timing-log-option all (Megatron-LM), or give a profile of all ranks.",
            )
        )
    statements.sources.append("timers of a training framework")


def _take(
    line: str,
    name: str,
    times: dict[str, dict[int, list[float]]],
    ranges: dict[str, list[tuple[float, float]]],
    statements: Statements,
) -> str:
    """One line. Returns the timer that the next lines belong to."""
    if (row := _RANK_TIME.match(line)) and name:
        times.setdefault(name, {}).setdefault(int(row[1]), []).append(float(row[2]))
        statements.writers.add(int(row[1]))
    elif row := _MIN_MAX.match(line):
        ranges.setdefault(row[1], []).append((float(row[2]), float(row[3])))
    elif row := _NAME.match(line):
        return row[1].strip()
    elif row := _LOWEST.search(line):
        low, rank, high = float(row[1]), int(row[2]), float(row[3])
        statements.writers |= {rank, int(row[4])}
        if high > _CLEAR * low:
            words = f"reaches {low:.1f} TFLOPS where the fastest rank reaches {high:.1f}"
            statements.failures.append(Failure(rank, "slow", words, 0))
    elif row := _AFFECTED.search(line):
        for rank in _STRAGGLER_RANK.findall(row[1]):
            statements.failures.append(Failure(int(rank), "slow", "is a straggler by the report of NVRx", 0))
    elif row := _SCORE.search(line):
        times.setdefault("relative performance", {}).setdefault(int(row[1]), []).append(
            1 / max(float(row[2]), 1e-3)
        )
    elif row := _DEEPSPEED.search(line):
        rank = int(row[1] or row[3])
        for timer, value in re.findall(r"([\w\-]+): ([\d.]+)", row[2] or row[4]):
            times.setdefault(timer, {}).setdefault(rank, []).append(float(value))
        statements.writers.add(rank)
    return name


def _is_wide(rows: list[tuple[float, float]]) -> bool:
    low, high = np.median(np.array(rows), axis=0)
    return bool(high > _SPREAD * low > 0)


def _compare(name: str, by_rank: dict[int, list[float]], statements: Statements) -> None:
    """Name the ranks with a timer clearly above the other ranks' timers, if they are few."""
    if len(by_rank) < 3 or _COMMUNICATES.search(name):
        return
    value = {rank: float(np.median(own)) for rank, own in by_rank.items()}
    typical = float(np.median(list(value.values())))
    slow = [rank for rank, one in value.items() if one > _CLEAR * typical]
    if slow and 3 * len(slow) <= len(value):
        for rank in slow:
            words = f"{name} takes {value[rank]:.1f} ms where the median rank takes {typical:.1f} ms"
            statements.failures.append(Failure(rank, "slow", words, 0))


IMPORTER = Importer(
    "timers of a training framework (Megatron-LM, DeepSpeed, NVRx)",
    _accepts,
    collect=collect,
    is_general=True,
)
