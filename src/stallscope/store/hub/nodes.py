"""The machines that have sent data: kept in memory, written with the commits, at most every few seconds each.

Senders choose the names, so the work for a commit is limited: the writer's thread serves all tenants.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from stallscope.events.layout import Array
from stallscope.store.hub import schema
from stallscope.store.hub.journal import Entry
from stallscope.store.hub.packing import shared_text

WRITTEN_EVERY_US = 5_000_000
_ABOUT = ("gpu_model", "provider", "n_gpus", "agent")
_MAX_NODES, _TENANT_SHARE = 100_000, 0.75
"""Limit of listed machines, because senders choose the names; the rows of further machines are still stored."""

_MAX_NOTED, _MAX_WRITTEN = 20_000, 1_000
"""Limits of a commit: the machines noted, and the machines written. Later commits write the remaining machines."""

Key = tuple[str, str, str]


@dataclass
class _Node:
    first_us: int
    last_us: int
    written_us: int
    about: dict[str, object]


class Nodes:
    """Machines by tenant, cluster and name."""

    def __init__(self, stored: pa.Table):
        """stored: the rows of the table `nodes`."""
        self._lock = threading.Lock()
        self._nodes: dict[Key, _Node] = {}
        self._n_of: Counter[str] = Counter()
        self._unwritten: dict[Key, None] = {}
        stored = stored.set_column(
            stored.column_names.index("first_seen"), "first_seen", stored["first_seen"].cast(pa.int64())
        )
        stored = stored.set_column(
            stored.column_names.index("last_seen"), "last_seen", stored["last_seen"].cast(pa.int64())
        )
        for row in stored.to_pylist():
            about = {name: row[name] for name in _ABOUT if row[name] is not None}
            key = (row["tenant"], row["cluster_id"] or "", row["node_id"] or "")
            self._nodes[key] = _Node(row["first_seen"], row["last_seen"], row["last_seen"], about)
            self._n_of[key[0]] += 1

    def record(
        self, entries: Iterable[Entry], about: Iterable[tuple[str, pa.Table]], received_us: int
    ) -> pa.Table | None:
        """Record the senders of a commit, and their descriptions of themselves (tenant, rows of `nodes`).

        Returns the rows of `nodes` to write in the same commit, if any. A failed commit writes them some seconds later.
        """
        with self._lock:
            for tenant, rows in about:
                for row in rows.slice(0, _MAX_NOTED).to_pylist():
                    known = {name: row[name] for name in _ABOUT if row[name] is not None}
                    self._note((tenant, row["cluster_id"] or "", row["node_id"] or ""), known, received_us)
            for entry in entries:
                for cluster, node in _senders(entry.rows):
                    self._note((entry.tenant, cluster, node), {}, received_us)
            due = list(islice(self._unwritten, _MAX_WRITTEN))
            for key in due:
                del self._unwritten[key]
                self._nodes[key].written_us = received_us
            return self._rows(due) if due else None

    def _note(self, key: Key, about: dict[str, object], received_us: int) -> None:
        known = self._nodes.get(key)
        if known is None:
            n_of_tenant = self._n_of[key[0]]
            if len(self._nodes) < _MAX_NODES and n_of_tenant < _TENANT_SHARE * _MAX_NODES:
                self._nodes[key] = _Node(received_us, received_us, received_us, dict(about))
                self._n_of[key[0]] += 1
                self._unwritten[key] = None
            return
        known.last_us = received_us
        is_news = any(known.about.get(name) != value for name, value in about.items())
        known.about |= about
        if is_news or received_us - known.written_us >= WRITTEN_EVERY_US:
            self._unwritten[key] = None

    def rows(self, tenant: str) -> pa.Table:
        """The tenant's machines, as rows of the table `nodes`."""
        with self._lock:
            return self._rows([key for key in self._nodes if key[0] == tenant])

    def _rows(self, keys: Iterable[Key]) -> pa.Table:
        rows = [
            {
                "tenant": key[0],
                "cluster_id": key[1],
                "node_id": key[2],
                "first_seen": self._nodes[key].first_us,
                "last_seen": self._nodes[key].last_us,
                **self._nodes[key].about,
            }
            for key in sorted(keys)
        ]
        return pa.Table.from_pylist(rows, schema=schema.arrow_schema(schema.NODES))


def _senders(rows: pa.Table) -> list[tuple[str, str]]:
    """The distinct (cluster, node) of some rows; rows without a node are skipped."""
    clusters, nodes = (_only(rows[name]) for name in ("cluster_id", "node_id"))
    if clusters and nodes:
        pairs = [(clusters[0], nodes[0])]
    else:
        (clusters, of_cluster), (nodes, of_node) = (_coded(rows[name]) for name in ("cluster_id", "node_id"))
        both = np.unique(of_cluster * len(nodes) + of_node)[:_MAX_NOTED]
        pairs = [(clusters[code // len(nodes)], nodes[code % len(nodes)]) for code in both.tolist()]
    return [(cluster or "", node) for cluster, node in pairs if node]


def _only(texts: pa.ChunkedArray) -> list[str | None]:
    """The text that all rows share, as typical for rows of one machine; empty if they differ."""
    if texts.null_count == len(texts):
        return [None]
    if texts.num_chunks > 1 or texts.null_count:
        return []
    text = shared_text(texts.chunk(0))
    return [] if text is None else text.to_pylist()


def _coded(texts: pa.ChunkedArray) -> tuple[list[str | None], Array]:
    """The distinct texts, and the index of each row's text."""
    coded = texts.combine_chunks().dictionary_encode(null_encoding="encode")
    return coded.dictionary.to_pylist(), np.asarray(coded.indices).astype(np.int64)
