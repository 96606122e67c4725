"""Timers that training frameworks print: Megatron-LM (timers, straggler detector), DeepSpeed, NVRx reports.

The phrases are from megatron/core/timers.py and StragglerDetector in megatron/core/utils.py (core 0.8 to 0.14),
deepspeed/utils/timer.py (0.14) and the straggler callback of nvidia-resiliency-ext (0.3). Timers that all ranks print
name the slow rank; a minimum and a maximum across ranks show that ranks differ, not which. Timers of communication are
left out: in these the rank that comes last waits least.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Gap
from stallscope.importers.log_lines import wall_ns
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
_TIME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d)")


def _accepts(file: Path, head: bytes) -> bool:
    return any(word in head for word in _WORDS)


@dataclass
class _Timers:
    """The timers of one log. times: ms by timer and rank, in order; ranges: minimum and maximum by timer; lowest: the
    slowest rank of each report with its own and the highest throughput; affected: ranks that NVRx calls stragglers.
    """

    times: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    ranges: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    lowest: list[tuple[int, float, float]] = field(default_factory=list)
    affected: list[int] = field(default_factory=list)
    writers: set[int] = field(default_factory=set)
    last_ns: int = 0

    def overlaps(self, other: "_Timers") -> bool:
        """Whether two logs hold one timer of one rank: they are of different jobs or attempts."""
        both = (set(self.times[name]) & set(other.times[name]) for name in set(self.times) & set(other.times))
        return any(both) or bool(self.lowest and other.lowest) or bool(set(self.ranges) & set(other.ranges))

    def merge(self, other: "_Timers") -> None:
        """Add the timers of further ranks."""
        for name, by_rank in other.times.items():
            self.times.setdefault(name, {}).update(by_rank)
        self.ranges |= other.ranges
        self.lowest += other.lowest
        self.affected += other.affected
        self.writers |= other.writers


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the statements of the timers in some logs."""
    statements.sources.append("timers of a training framework")
    timers = _newest([_timers_of(file) for file in files])
    if timers is None:
        gap = Gap(
            "the timers come from several jobs, and the logs do not state their times",
            "Give the log of one job.",
        )
        statements.gaps.append(gap)
        return
    statements.writers |= timers.writers
    for name, by_rank in timers.times.items():
        _compare(name, by_rank, statements)
    _compare_lowest(timers.lowest, statements)
    for rank in dict.fromkeys(timers.affected):
        statements.failures.append(Failure(rank, "slow", "is a straggler by the report of NVRx", 0))
    ranges = timers.ranges
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


def _newest(logs: list[_Timers]) -> _Timers | None:
    """The timers of one job from its logs; None if the logs are of several jobs and state no times."""
    logs = sorted(logs, key=lambda log: log.last_ns)
    newest = logs[-1]
    others = [log for log in logs[:-1] if not log.overlaps(newest)]
    if len(others) < len(logs) - 1 and not all(log.last_ns for log in logs):
        return None
    for log in others:
        newest.merge(log)
    return newest


def _timers_of(file: Path) -> _Timers:
    timers, name = _Timers(), ""
    for line in lines_of(file):
        name = _take(line, name, timers)
        if time := _TIME.search(line[:60]):
            timers.last_ns = max(timers.last_ns, wall_ns(time["date"], time["time"]))
    return timers


def _take(line: str, name: str, timers: _Timers) -> str:
    """One line. Returns the timer that the next lines belong to."""
    if (row := _RANK_TIME.match(line)) and name:
        timers.times.setdefault(name, {}).setdefault(int(row[1]), []).append(float(row[2]))
        timers.writers.add(int(row[1]))
    elif row := _MIN_MAX.match(line):
        timers.ranges.setdefault(row[1], []).append((float(row[2]), float(row[3])))
    elif row := _NAME.match(line):
        return row[1].strip()
    elif row := _LOWEST.search(line):
        timers.lowest.append((int(row[2]), float(row[1]), float(row[3])))
        timers.writers |= {int(row[2]), int(row[4])}
    elif row := _AFFECTED.search(line):
        timers.affected = [int(rank) for rank in _STRAGGLER_RANK.findall(row[1])]
    elif row := _SCORE.search(line):
        score = timers.times.setdefault("relative performance", {}).setdefault(int(row[1]), [])
        score.append(1 / max(float(row[2]), 1e-3))
    elif row := _DEEPSPEED.search(line):
        rank = int(row[1] or row[3])
        for timer, value in re.findall(r"([\w\-]+): ([\d.]+)", row[2] or row[4]):
            timers.times.setdefault(timer, {}).setdefault(rank, []).append(float(value))
        timers.writers.add(rank)
    return name


def _is_wide(rows: list[tuple[float, float]]) -> bool:
    low, high = np.median(np.array(rows), axis=0)
    return bool(high > _SPREAD * low > 0)


def _compare(name: str, by_rank: dict[int, list[float]], statements: Statements) -> None:
    """Name the ranks with a timer clearly above the other ranks' timers, if they are few.

    The later half of the reports counts: a log may begin with another job, and a rank may become slow.
    """
    n_reports = int(np.median([len(own) for own in by_rank.values()]))
    whole = {
        rank: own[-max((n_reports + 1) // 2, 1) :]
        for rank, own in by_rank.items()
        if 2 * len(own) >= n_reports
    }
    if len(whole) < 3 or _COMMUNICATES.search(name):
        return
    value = {rank: float(np.median(own)) for rank, own in whole.items()}
    typical = float(np.median(list(value.values())))
    slow = [rank for rank, ms in value.items() if ms > _CLEAR * typical]
    if slow and 3 * len(slow) <= len(value):
        for rank in slow:
            words = f"{name} takes {value[rank]:.1f} ms where the median rank takes {typical:.1f} ms"
            statements.failures.append(Failure(rank, "slow", words, 0))


def _compare_lowest(reports: list[tuple[int, float, float]], statements: Statements) -> None:
    """Name the ranks with a clearly lower throughput in a quarter or more of the later reports."""
    later = reports[-max((len(reports) + 1) // 2, 1) :] if reports else []
    clear = [(rank, low, high) for rank, low, high in later if high > _CLEAR * low]
    for rank in dict.fromkeys(rank for rank, _, _ in clear):
        rows = [(low, high) for of_rank, low, high in clear if of_rank == rank]
        if 4 * len(rows) >= len(later) and 2 * len(clear) >= len(later):
            low, high = np.median(np.array(rows), axis=0)
            words = f"reaches {low:.1f} TFLOPS where the fastest rank reaches {high:.1f}"
            statements.failures.append(Failure(rank, "slow", words, 0))


IMPORTER = Importer(
    "timers of a training framework (Megatron-LM, DeepSpeed, NVRx)",
    _accepts,
    collect=collect,
    is_general=True,
)
