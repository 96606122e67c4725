"""Statistics of CUDA calls and balances of memory, from the kernel's running sums to rows of tables.

The sums only grow; a row holds the growth since the last row of its kind. Calls whose group of probes is switched on
and off are reported once per period and scaled up to the whole period: an estimate, which is marked.
"""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from stallscope.capture.probes.maps import Entries
from stallscope.capture.probes.operations import GROUPS, OPS
from stallscope.events import kernel, layout
from stallscope.events.kernel import HookGroup
from stallscope.events.layout import UNKNOWN, Array, Table

_SUMS = ("n", "n_failed", "total_ns", "count_bytes")
_EDGES = [f'"{1 << (kernel.FIRST_BUCKET_BITS + i)}"' for i in range(kernel.N_BUCKETS)]
_COMPLETE_SHARE = 0.98
"""If the probes were on for this share of an interval, the counts of the interval are complete."""


class ProbedInterval(NamedTuple):
    """An interval, and how long the probes were on in it."""

    interval_ns: int
    on_ns: int


class Coverage(Protocol):
    """Reports when the probes of a group were on: governor.Governor."""

    def probed_interval(self, group: HookGroup, now_ns: int) -> ProbedInterval | None:
        """The interval since the last result that was not None; None while the interval is not complete."""


@dataclass
class CallSums:
    """The sums reported so far. operations, balances: read the kernel's maps, as Program does."""

    node: int
    operations: Callable[[], Entries]
    balances: Callable[[], Entries]
    coverage: Coverage
    own_pid: int = 0
    _totals: dict[int, Array] = field(default_factory=dict)
    _balances: dict[int, Array] = field(default_factory=dict)

    def rows(self, now_ns: int) -> list[tuple[Table, Array]]:
        """The rows of this second. Raises CannotTrace."""
        return [
            (layout.OPERATIONS, self._calls(self.operations(), now_ns)),
            (layout.MEMORY, self._memory(self.balances(), now_ns)),
        ]

    def final_rows(self, pids: Collection[int], ended_ns: int) -> Array:
        """Rows of MEMORY with zero memory for processes that have ended; then the processes are forgotten."""
        ended_pids = frozenset(pids)
        self._totals = {
            key: values
            for key, values in self._totals.items()
            if int(_keys(key, kernel.OPERATION_KEY)["tgid"]) not in ended_pids
        }
        ended_balances = {
            key: balance
            for key, balance in self._balances.items()
            if int(_keys(key, kernel.BALANCE_KEY)["tgid"]) in ended_pids
        }
        for key in ended_balances:
            del self._balances[key]
        if not ended_balances:
            return layout.empty(layout.MEMORY)
        keys = np.array(list(ended_balances), np.uint64).view(kernel.BALANCE_KEY)
        values = np.array(list(ended_balances.values()), kernel.BALANCE)
        values["live_bytes"] = values["n_live"] = 0
        return self._balance_rows(Entries(keys, values), ended_ns)

    def ended_untraced(self, traced: Container[int], proc: Path = Path("/proc")) -> list[int]:
        """Counted processes that have ended and are not traced; the end of a traced process is reported separately."""
        keys = np.fromiter(self._totals, np.uint64, len(self._totals)).view(kernel.OPERATION_KEY)
        return [
            pid
            for pid in np.unique(keys["tgid"]).tolist()
            if pid not in traced and not (proc / str(pid)).exists()
        ]

    def _calls(self, entries: Entries, now_ns: int) -> Array:
        is_known = (entries.keys["symbol"] > 0) & (entries.keys["tgid"] != self.own_pid)
        keys, values = entries.keys[is_known], entries.values[is_known]
        groups = GROUPS[keys["symbol"]]
        tables = [
            self._growth_rows(keys[groups == group], values[groups == group], probed, now_ns)
            for group in HookGroup
            if (probed := self.coverage.probed_interval(group, now_ns)) is not None
        ]
        return np.concatenate([layout.empty(layout.OPERATIONS), *tables])

    def _growth_rows(self, keys: Array, values: Array, probed: ProbedInterval, now_ns: int) -> Array:
        numbers = keys.view(np.uint64).tolist()
        nothing = np.zeros((), kernel.OPERATION)
        before = np.array([self._totals.get(name, nothing) for name in numbers], kernel.OPERATION)
        has_grown = values["n"] != before["n"]
        keys, values, before = keys[has_grown], values[has_grown], before[has_grown]
        for name, totals in zip(keys.view(np.uint64).tolist(), values, strict=True):
            self._totals[name] = totals.copy()
        is_estimate = probed.on_ns < _COMPLETE_SHARE * probed.interval_ns
        scale = probed.interval_ns / max(probed.on_ns, 1) if is_estimate else 1.0
        rows = layout.empty(layout.OPERATIONS, len(keys))
        growth = {name: (values[name] - before[name]).astype(np.int64) for name in _SUMS}
        rows["ts_ns"], rows["interval_ns"], rows["node"] = now_ns, probed.interval_ns, self.node
        rows["pid"], rows["symbol"], rows["op"] = keys["tgid"], keys["symbol"], OPS[keys["symbol"]]
        rows["direction"], rows["host_memory"] = keys["direction"], keys["host_memory"]
        rows["n_seen"], rows["n_failed"] = growth["n"], growth["n_failed"]
        rows["n"] = np.rint(growth["n"] * scale)
        rows["total_ns"] = np.rint(growth["total_ns"] * scale)
        rows["count_bytes"] = np.rint(growth["count_bytes"] * scale)
        rows["max_ns"] = values["max_ns"]
        rows["first_ns"] = np.where(before["n"] == 0, values["first_ns"].astype(np.int64), UNKNOWN)
        rows["is_estimate"] = is_estimate
        rows["histogram"] = [
            _histogram(counts) for counts in (values["histogram"] - before["histogram"]).tolist()
        ]
        return rows

    def _memory(self, entries: Entries, now_ns: int) -> Array:
        names = entries.keys.view(np.uint64).tolist()
        changed = [
            i
            for i, name in enumerate(names)
            if name not in self._balances or self._balances[name] != entries.values[i]
        ]
        for i in changed:
            self._balances[names[i]] = entries.values[i].copy()
        return self._balance_rows(Entries(entries.keys[changed], entries.values[changed]), now_ns)

    def _balance_rows(self, entries: Entries, ts_ns: int) -> Array:
        rows = layout.empty(layout.MEMORY, len(entries.keys))
        rows["ts_ns"], rows["node"], rows["pid"] = ts_ns, self.node, entries.keys["tgid"]
        rows["device"], rows["kind"] = entries.keys["device"], entries.keys["memory"]
        for name in kernel.BALANCE.names or ():
            rows[name] = entries.values[name]
        return rows


def _keys(number: int, dtype: "np.dtype[np.void]") -> Array:
    return np.array([number], np.uint64).view(dtype)[0]


def _histogram(counts: list[int]) -> bytes:
    """A histogram as JSON: the count of each bucket that is not empty, by the bucket's upper edge."""
    return f"{{{','.join(f'{edge}:{n}' for edge, n in zip(_EDGES, counts, strict=True) if n)}}}".encode()
