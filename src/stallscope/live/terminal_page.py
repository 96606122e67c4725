"""Draws the page of a running trace: whole lines, at any width and height."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stallscope.events.names import CATEGORY_NAMES
from stallscope.live.state import OpLine, RankLine

_BAR_WIDTH = 24
_WIDE = 80
_MARKS = {
    "on_cpu": ("#", "green"),
    "wait_gpu": (".", "blue"),
    "device": (":", "cyan"),
    "preempted": ("P", "bold red"),
    "stopped": ("S", "bold red"),
    "io": ("I", "bold magenta"),
    "lock": ("L", "bold yellow"),
    "sleep": ("z", "yellow"),
    "net": ("N", "magenta"),
    "child": ("D", "magenta"),
    "fault": ("F", "red"),
    "driver": ("V", "cyan"),
    "launch": ("U", "cyan"),
    "copy": ("C", "bold cyan"),
    "alloc": ("A", "bold cyan"),
    "other_off": ("o", "yellow"),
}
"""A letter for each category, so that the bar is readable without colour."""

_WORST = "bold yellow"
_WORTH_A_LOOK_MS = 1.0


@dataclass(frozen=True)
class VerdictLine:
    """One incident. time: time of day, UTC, at which it opened. severity: empty if unknown."""

    time: str
    is_over: bool
    summary: str
    severity: str = ""


@dataclass(frozen=True)
class Page:
    """Contents of the page. title, job, system: one line each. host_lines, notes: newest last."""

    title: str
    job: str
    system: str
    ranks: Sequence[RankLine]
    operations: Sequence[OpLine]
    host_lines: Sequence[str] = ()
    verdicts: Sequence[VerdictLine] = ()
    n_lost: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


def drawn(page: Page, width: int, height: int) -> Group:
    """The page for a terminal of this size; if it is too low, ranks are cut first, and their number is shown."""
    verdicts = [_verdict(line) for line in page.verdicts[-5:]]
    operations: list[RenderableType] = []
    if page.operations and height >= 12:
        operations = [Text(), _operations(page.operations, width)]
    foot = (
        [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in page.notes[-2:]]
        if height >= 16
        else []
    )
    n_used = 5 + len(verdicts) + len(foot) + len(page.host_lines)
    n_used += len(page.operations) + 3 if operations else 0
    room = max(height - n_used - 3, 3)
    return Group(
        Text(page.title, style="bold", no_wrap=True, overflow="ellipsis"),
        Text(page.job, no_wrap=True, overflow="ellipsis"),
        _losses(page),
        Text(page.system, no_wrap=True, overflow="ellipsis", style="dim"),
        Text(),
        *([_ranks(page.ranks, width, room)] if page.ranks else [Text("no job yet", style="dim")]),
        *operations,
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in page.host_lines),
        *([Text(), *verdicts] if verdicts else []),
        *foot,
    )


def bar(shares: Sequence[float], width: int = _BAR_WIDTH) -> Text:
    """The shares of a time ledger as letters, the largest first; cells are proportional to the shares."""
    out = Text()
    if sum(shares) <= 0:
        return Text("-" * width, style="dim")
    reached = 0.0
    order = sorted(range(len(shares)), key=lambda i: -shares[i])
    for i in order:
        mark, style = _MARKS[CATEGORY_NAMES[i]]
        begin, reached = round(reached * width), reached + shares[i]
        out.append(mark * (round(reached * width) - begin), style)
    return out


def _ranks(lines: Sequence[RankLine], width: int, room: int) -> Table:
    worst = max((line.worst_ms or 0.0 for line in lines), default=0.0)
    shown = lines
    if len(lines) > room:
        by_late = sorted(lines, key=lambda line: -(line.worst_ms or 0.0))[: room - 1]
        shown = [line for line in lines if line in by_late]
    has_host = width >= 100 and len({line.node for line in lines}) > 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    is_wide = width >= _WIDE
    for name in ("rank", "process", *(("rounds",) if is_wide else ()), "late", "at most"):
        table.add_column(name, justify="left" if name == "process" else "right", no_wrap=True)
    table.add_column(_legend(lines) if is_wide else "time", no_wrap=True)
    for line in shown:
        is_worst = line.worst_ms is not None and line.worst_ms == worst and worst >= _WORTH_A_LOOK_MS
        name = f"{line.comm} {line.pid}" if line.is_alive else f"{line.comm} {line.pid} (ended)"
        table.add_row(
            "?" if line.rank < 0 else str(line.rank),
            Text(f"{line.node} {name}" if has_host else name),
            *([f"{line.n_rounds:,}"] if is_wide else []),
            _late(line.late_ms),
            Text(_late(line.worst_ms), style=_WORST if is_worst else ""),
            bar(line.shares, _BAR_WIDTH if is_wide else 10),
        )
    if len(shown) < len(lines):
        table.add_row("", Text(f"and {len(lines) - len(shown)} less late processes", style="dim"))
    return table


def _late(value_ms: float | None) -> str:
    """Lateness; empty if unknown, 0 for a rank that arrives before the median."""
    return "" if value_ms is None else f"{max(value_ms, 0.0):,.1f} ms"


def _legend(lines: Sequence[RankLine]) -> Text:
    """The meaning of the letters in use, the largest share first."""
    total = [sum(line.shares[i] for line in lines) for i in range(len(CATEGORY_NAMES))]
    present = sorted((i for i, share in enumerate(total) if share >= 0.02), key=lambda i: -total[i])
    words = [f"{_MARKS[CATEGORY_NAMES[i]][0]} {CATEGORY_NAMES[i]}" for i in present[:4]]
    return Text("  ".join(words) if words else "time", style="dim")


def _operations(lines: Sequence[OpLine], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("operation", no_wrap=True)
    names = ("calls", "p50", "p95", "p99", "first") if width >= _WIDE else ("calls", "p50", "p99")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        title = f"{line.name} (from 1 ms on)" if line.only_slow and len(line.timed_ms) else line.name
        cells = {
            "calls": f"{line.n_calls:,}",
            "p50": _ms(line.quantile_ms(0.5)),
            "p95": _ms(line.quantile_ms(0.95)),
            "p99": _ms(line.quantile_ms(0.99)),
            "first": _ms(line.first_ms),
        }
        table.add_row(Text(title), *(cells[name] for name in names))
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f} ms" if value < 1000 else f"{value / 1000:,.2f} s"


def _losses(page: Page) -> Text:
    if not page.n_lost:
        return Text("no records lost")
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in sorted(page.lost.items()))
    return Text(f"{page.n_lost:,} records lost ({kinds}): verdicts are less certain", style="bold red")


def _verdict(line: VerdictLine) -> Text:
    severity = f"{line.severity} " if line.severity else ""
    return Text(f"{line.time} {severity}{line.summary}", style="dim" if line.is_over else "bold yellow")
