"""The view that a user has chosen with keys: order, job, rank, and the part of the page that is shown."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stallscope.live.job_totals import RankLine


class Panel(StrEnum):
    """The main part of the page."""

    RANKS = "ranks"
    LEDGER = "ledger"  # of one rank
    EXPLAIN = "explain"
    REQUESTS = "requests"  # to inference engines
    HELP = "help"


class Order(StrEnum):
    """The order of the ranks."""

    WORST = "worst lateness"
    LATE = "median lateness"
    RANK = "rank"
    CPU = "time on a CPU"


HELP = (
    ("q", "end the trace"),
    ("s", "order of the ranks: worst lateness, median lateness, rank, time on a CPU"),
    ("space", "pause, and continue"),
    ("up, down", "select a rank"),
    ("enter", "time ledger of the selected rank as bars"),
    ("e", "explain: the report on the trace so far; up and down scroll"),
    ("r", "requests to inference engines: open requests, rate and times of each endpoint"),
    ("tab", "next job"),
    ("? or h", "this list; escape returns"),
)


@dataclass(frozen=True)
class View:
    """job: number of the shown job. selected: pid of a rank, None: the latest. top: first shown line of a report."""

    panel: Panel = Panel.RANKS
    order: Order = Order.WORST
    job: int = 0
    selected: int | None = None
    is_paused: bool = False
    top: int = 0

    def after(self, key: str, pids: Sequence[int], n_jobs: int) -> "View":
        """The view after a key. pids: of the shown ranks, in their order."""
        if key in ("?", "h"):
            return replace(self, panel=Panel.RANKS if self.panel is Panel.HELP else Panel.HELP)
        if key == "escape":
            return replace(self, panel=Panel.RANKS, top=0)
        if key in (" ", "p"):
            return replace(self, is_paused=not self.is_paused)
        if key == "s":
            orders = list(Order)
            return replace(self, order=orders[(orders.index(self.order) + 1) % len(orders)])
        if key == "tab" and n_jobs:
            return replace(self, job=(self.job + 1) % n_jobs, selected=None, panel=Panel.RANKS)
        if key == "e":
            return replace(self, panel=Panel.RANKS if self.panel is Panel.EXPLAIN else Panel.EXPLAIN, top=0)
        if key == "r":
            return replace(self, panel=Panel.RANKS if self.panel is Panel.REQUESTS else Panel.REQUESTS)
        if key == "enter":
            return replace(self, panel=Panel.RANKS if self.panel is Panel.LEDGER else Panel.LEDGER)
        if step := {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}.get(key):
            return self._moved(step, pids)
        return self

    def _moved(self, step: int, pids: Sequence[int]) -> "View":
        if self.panel is Panel.EXPLAIN:
            return replace(self, top=max(self.top + step, 0))
        if not pids:
            return self
        at = pids.index(self.selected) if self.selected in pids else 0
        return replace(self, selected=pids[min(max(at + step, 0), len(pids) - 1)])


def ordered(lines: Sequence[RankLine], order: Order) -> list[RankLine]:
    """The ranks in an order; equal ranks by number."""

    def key(line: RankLine) -> tuple[float, int, int]:
        values = {Order.WORST: line.worst_ms, Order.LATE: line.late_ms, Order.CPU: line.shares[0]}
        return -(values.get(order) or 0.0), line.rank if line.rank >= 0 else 1 << 40, line.pid

    return sorted(lines, key=key)
