"""Parts of the data that the continuous diagnosis did not examine, so that no answer calls them healthy."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_KEPT_S = 900.0
"""How long a failure is reported: most queries are about the last minutes."""

_MAX_CLUSTERS = 200
"""Named clusters of a tenant, because senders choose the names; the rows of further clusters are counted together."""

OTHERS = "\0"
"""Stands for the further clusters of a tenant."""


@dataclass
class _Cluster:
    last_s: float
    n_rows: int = 0
    failure: str = ""
    every: int = 1


class Unexamined:
    """By tenant and cluster: failed evaluations and skipped rows. Thread-safe."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic):
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._clusters: dict[tuple[str, str], _Cluster] = {}
        self._others: dict[tuple[str, str], _Cluster] = {}

    def add(self, tenant: str, cluster: str, *, n_rows: int = 0, failure: str = "", every: int = 1) -> None:
        """Record unexamined rows, or a failed evaluation with its reason. every: every k-th round was examined."""
        with self._lock:
            now_s = self._clock_s()
            cluster = self._name(tenant, cluster, now_s)
            known = self._clusters.get((tenant, cluster))
            if known is None or now_s - known.last_s > _KEPT_S:
                known = self._clusters[tenant, cluster] = _Cluster(now_s)
            known.last_s = now_s
            known.n_rows += n_rows
            known.failure = failure or known.failure
            known.every = max(known.every, every)

    def _name(self, tenant: str, cluster: str, now_s: float) -> str:
        """The cluster; OTHERS if the tenant has too many clusters already."""
        if (tenant, cluster) in self._clusters or self._n_of(tenant) < _MAX_CLUSTERS:
            return cluster
        self._clusters = {
            key: known for key, known in self._clusters.items() if now_s - known.last_s <= _KEPT_S
        }
        return cluster if self._n_of(tenant) < _MAX_CLUSTERS else OTHERS

    def _n_of(self, tenant: str) -> int:
        return sum(owner == tenant for owner, _ in self._clusters)

    def known(self) -> list[tuple[str, str, int, str, int]]:
        """(tenant, cluster, rows, failure, every) of the last minutes, for other hubs."""
        with self._lock:
            border_s = self._clock_s() - _KEPT_S
            return [
                (tenant, cluster, known.n_rows, known.failure, known.every)
                for (tenant, cluster), known in self._clusters.items()
                if known.last_s >= border_s
            ]

    def learn(self, others: Iterable[tuple[str, str, int, str, int]]) -> None:
        """Replace the reports of other hubs, see known()."""
        with self._lock:
            now_s = self._clock_s()
            self._others = {
                (tenant, cluster): _Cluster(now_s, n_rows, failure, every)
                for tenant, cluster, n_rows, failure, every in others
            }

    def n_rows(self, tenant: str, cluster: str | None) -> int:
        """Rows of the last minutes that were not examined, of a cluster (None: all of the tenant's)."""
        with self._lock:
            border_s = self._clock_s() - _KEPT_S
            return sum(
                known.n_rows
                for (owner, name), known in self._all()
                if owner == tenant and self._is_about(owner, name, cluster) and known.last_s >= border_s
            )

    def reason(self, tenant: str, cluster: str | None) -> str:
        """Why an answer about a cluster (None: all of the tenant's) is incomplete; "" if it is complete."""
        with self._lock:
            border_s = self._clock_s() - _KEPT_S
            parts = [
                _sentence(name, known)
                for (owner, name), known in sorted(self._all(), key=lambda each: each[0])
                if owner == tenant and self._is_about(owner, name, cluster) and known.last_s >= border_s
            ]
        return " ".join(parts)

    def _is_about(self, tenant: str, name: str, cluster: str | None) -> bool:
        """Whether an entry with this name is about a cluster (None: any)."""
        return cluster in (None, name) or (name == OTHERS and (tenant, cluster) not in self._clusters)

    def _all(self) -> list[tuple[tuple[str, str], _Cluster]]:
        return [*self._clusters.items(), *self._others.items()]


def _sentence(name: str, known: _Cluster) -> str:
    parts = []
    if known.failure:
        parts.append(f"an evaluation failed ({known.failure})")
    if known.n_rows:
        sample = f" (only every {known.every}th round was)" if known.every > 1 else ""
        parts.append(f"{known.n_rows:,} rows were not examined{sample}")
    clusters = "further clusters" if name == OTHERS else f"cluster {name!r}"
    return f"For {clusters} the diagnosis is incomplete: {' and '.join(parts)} in the last minutes."
