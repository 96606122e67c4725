"""The thresholds of cohorts, at the hub: median and median absolute deviation (MAD) of each signal.

A report is one object: version, node, cluster, cohort, signals, and the machine's own state, score and reason. The
answer holds, for each signal that a quorum of machines reports, its median and its threshold.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stallscope.errors import BadInput, TooMany
from stallscope.health import WINDOW_S
from stallscope.health.node_state import STATES
from stallscope.health.signals import SIGNALS

QUORUM = 4
"""With fewer machines the median may not be the typical machine: two slow machines of three would define it."""

DEVIATIONS = 3.5
"""Standard deviations below the median, estimated by 1.4826 x MAD, which a few slow machines do not widen."""

_FRESH_S = 3.0 * WINDOW_S
_MAX_BYTES = 8_192
_MAX_TEXT = 256
_MAX_NODES = 20_000


@dataclass(frozen=True)
class Known:
    """The latest report of a machine. at_s: monotonic. since_s: wall clock, start of its state."""

    cohort: str
    signals: dict[str, float]
    state: str
    score: float | None
    reason: str
    at_s: float
    since_s: float


@dataclass
class Cohorts:
    """The machines that have reported, by tenant. Thread-safe."""

    clock_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    _nodes: dict[str, dict[tuple[str, str], Known]] = field(default_factory=dict)
    _cohorts: dict[tuple[str, str, str], dict[str, Known]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, body: bytes, tenant: str) -> dict[str, Any]:
        """Store a report, and return the thresholds of its cohort. Raises BadInput, TooMany."""
        data = _checked(body)
        key, now_s = (data["cluster"], data["node"]), self.clock_s()
        with self._lock:
            nodes = self._nodes.setdefault(tenant, {})
            known = nodes.get(key)
            if known is None and len(nodes) >= _MAX_NODES:
                nodes = self._forget_old(tenant, now_s)
                if len(nodes) >= _MAX_NODES:
                    raise TooMany(f"more than {_MAX_NODES:,} machines report their health")
            is_same = known is not None and known.state == data["state"]
            if known is not None and known.cohort != data["cohort"]:
                self._leave(tenant, key, known)
            present = nodes[key] = Known(
                cohort=data["cohort"],
                signals=data["signals"],
                state=data["state"],
                score=data["score"],
                reason=data["reason"],
                at_s=now_s,
                since_s=known.since_s if known and is_same else self.wall_s(),
            )
            cohort = self._cohorts.setdefault((tenant, data["cluster"], data["cohort"]), {})
            cohort[data["node"]] = present
            members = list(cohort.values())
        peers = [each.signals for each in members if now_s - each.at_s <= _FRESH_S]
        return {"n_nodes": len(peers), "quorum": QUORUM, "signals": thresholds(peers)}

    def _forget_old(self, tenant: str, now_s: float) -> dict[tuple[str, str], Known]:
        """The machines of a tenant without the machines that have stopped reporting."""
        before = self._nodes[tenant]
        self._nodes[tenant] = _fresh(before, now_s)
        for key in before.keys() - self._nodes[tenant].keys():
            self._leave(tenant, key, before[key])
        return self._nodes[tenant]

    def _leave(self, tenant: str, key: tuple[str, str], known: Known) -> None:
        """Take a machine out of its cohort."""
        cluster, node = key
        cohort = self._cohorts[tenant, cluster, known.cohort]
        cohort.pop(node, None)
        if not cohort:
            del self._cohorts[tenant, cluster, known.cohort]

    def stragglers(self, tenant: str) -> list[dict[str, Any]]:
        """The machines that report themselves as stragglers now, the lowest score first."""
        now_s = self.clock_s()
        with self._lock:
            nodes = _fresh(self._nodes.get(tenant, {}), now_s)
        rows = [
            {
                "cluster": cluster,
                "node": node,
                "score": known.score,
                "reason": known.reason,
                "since_ms": round(known.since_s * 1000),
            }
            for (cluster, node), known in nodes.items()
            if known.state == "straggler"
        ]
        return sorted(rows, key=lambda row: (row["score"] or 0.0, row["node"]))

    def n_nodes(self, tenant: str) -> int:
        """The number of machines that report now."""
        with self._lock:
            return len(_fresh(self._nodes.get(tenant, {}), self.clock_s()))

    def numbers(self) -> dict[str, float]:
        """Sums over all tenants, for /metrics."""
        with self._lock:
            now_s = self.clock_s()
            fresh = [known for nodes in self._nodes.values() for known in _fresh(nodes, now_s).values()]
        return {
            "nodes_reporting": len(fresh),
            "nodes_straggling": sum(known.state == "straggler" for known in fresh),
        }


def thresholds(peers: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and threshold of each signal that a quorum of the cohort reports."""
    out = {}
    for name, signal in SIGNALS.items():
        values = [each[name] for each in peers if name in each]
        if len(values) < QUORUM:
            continue
        middle = median(values)
        spread = 1.4826 * median(abs(value - middle) for value in values)
        out[name] = {
            "median": middle,
            "threshold": middle - max(DEVIATIONS * spread, signal.floor * middle),
        }
    return out


def _fresh(nodes: dict[tuple[str, str], Known], now_s: float) -> dict[tuple[str, str], Known]:
    return {key: known for key, known in nodes.items() if now_s - known.at_s <= _FRESH_S}


def _checked(body: bytes) -> dict[str, Any]:
    """The fields of a report. Raises BadInput for another shape, an unknown state, or a number that is not finite."""
    if len(body) > _MAX_BYTES:
        raise BadInput(f"the report on a machine's health is larger than {_MAX_BYTES:,} bytes")
    try:
        data = json.loads(body)
        if not isinstance(data["signals"], dict):
            raise TypeError("signals")
        signals = {name: float(data["signals"][name]) for name in SIGNALS if name in data["signals"]}
        score = None if data["score"] is None else float(data["score"])
        texts = {
            name: str(data[name])[:_MAX_TEXT] for name in ("node", "cluster", "cohort", "state", "reason")
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise BadInput(
            "a report on a machine's health needs node, cluster, cohort, state, score, reason, signals"
        ) from None
    numbers = [*signals.values(), 0.0 if score is None else score]
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or texts["state"] not in STATES:
        raise BadInput(
            f"a report on a machine's health needs finite signals and one of the states {', '.join(STATES)}"
        )
    if not texts["node"] or not texts["cohort"]:
        raise BadInput("a report on a machine's health needs the name of its node and its cohort")
    return texts | {"signals": signals, "score": score}
