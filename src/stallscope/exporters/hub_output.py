"""The agent's output to a hub: sends captured rows several times a second and never blocks the caller.

    output = HubOutput.open(target, spool_folder, max_spool_bytes=...)
    output.offer({"collectives": rows, ...}, clock=clock.reading(0), symbols=names)
    output.status()        # "hub has 12,345"
    output.close()

Imported only by an agent with --hub, because it loads gRPC and nanoarrow.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.trace import Clock
from stallscope.exporters import hub_batches
from stallscope.exporters.hub_channel import HubChannel, Target
from stallscope.exporters.hub_sender import HubSender
from stallscope.exporters.spool import Spool

__all__ = ["HubOutput", "Target"]

_LAST_S = 5.0
_OWNERS_EVERY_NS = 600_000_000_000
_BY_NAME = {table.name: table for table in layout.HUB_TABLES}


class HubOutput:
    """An open connection to a hub, for use by one thread. Slow work runs in other threads."""

    def __init__(
        self,
        sender: HubSender,
        report_health: Callable[[bytes], bytes | None] = lambda _: None,
        unanswered: Callable[[], str] = lambda: "",
    ):
        """report_health, unanswered (HubChannel.complaint): see HubChannel; report_health is for another thread."""
        self._sender, self.report_health, self._unanswered = sender, report_health, unanswered
        self._n_reported_lost = 0
        self._processes: dict[int, Array] = {}
        self._communicators: dict[tuple[int, int], Array] = {}
        self._ended: dict[str, list[Array]] = {}
        self._owners: dict[int, Array] = {}
        self._owners_again_ns = 0

    @classmethod
    def open(cls, target: Target, spool_folder: Path, *, max_spool_bytes: int) -> "HubOutput":
        """Raises BadInput (certificates), StorageFailed (the spool). Does not wait for the hub."""
        channel = HubChannel(target)
        sender = HubSender(Spool(spool_folder, max_bytes=max_spool_bytes), channel)
        return cls(sender, channel.report_health, channel.complaint)

    def offer(
        self,
        tables: Mapping[str, Array],
        *,
        clock: Clock,
        symbols: Sequence[str] = (),
        is_synchronised: bool | None = None,
        lost: Mapping[str, int] | None = None,
    ) -> None:
        """Send rows of events tables, by name. clock: a fresh reading. The arrays are neither kept nor changed.

        lost: records lost since the last call, by kind; rows that this output dropped are added.
        """
        self._remember(tables)
        tables = {**tables, **self._with_ends(tables), **self._with_owners(tables, clock.monotonic_ns)}
        ranks = {
            pid: (int(row["rank"][0]), int(row["local_rank"][0])) for pid, row in self._processes.items()
        }
        sent = {
            name: hub_batches.on_wall_clock(_BY_NAME[name], rows, clock, symbols, ranks=ranks)
            for name, rows in tables.items()
            if len(rows)
        }
        n_not_sent = self._sender.n_not_sent
        losses = {**(lost or {}), "not sent to the hub": n_not_sent - self._n_reported_lost}
        self._n_reported_lost = n_not_sent
        if any(losses.values()):
            sent["losses"] = hub_batches.loss_rows(clock.wall_ns, losses)
        if sent:
            sent["clocks"] = hub_batches.clock_row(clock, is_synchronised=is_synchronised)
            self._sender.offer(sent)

    def process_ended(self, pid: int, ended_ns: int) -> None:
        """Send the row of a process again with the next offer(), with its end."""
        self._add_end("processes", self._processes.pop(pid, None), ended_ns)
        self._owners.pop(pid, None)
        for key in [key for key in self._communicators if key[0] == pid]:
            del self._communicators[key]

    def process_rank_known(self, pid: int, rank: int, *, nranks: int) -> None:
        """Send the row of a process again with the next offer(), with a rank that was not known before."""
        row = self._processes.get(pid)
        if row is not None:
            row["rank"], row["nranks"] = rank, nranks
            self._ended.setdefault("processes", []).append(row.copy())

    def process_device_known(self, pid: int, device: int) -> None:
        """Send the row of a process again with the next offer(), with a GPU that was not known before."""
        row = self._processes.get(pid)
        if row is not None:
            row["device"] = device
            self._ended.setdefault("processes", []).append(row.copy())

    def process_libraries_known(self, pid: int, libraries: str) -> None:
        """Send the row of a process again with the next offer(), with its present communication libraries."""
        row = self._processes.get(pid)
        if row is not None:
            row["libraries"] = libraries.encode()
            self._ended.setdefault("processes", []).append(row.copy())

    def communicator_ended(self, pid: int, comm_hash: int, *, ended_ns: int) -> None:
        """Send the row of a communicator again with the next offer(), with the time at which the process left it."""
        self._add_end("communicators", self._communicators.pop((pid, comm_hash), None), ended_ns)

    def _remember(self, tables: Mapping[str, Array]) -> None:
        for row in tables.get("processes", ()):
            self._processes[int(row["pid"])] = np.array([row])
        for row in tables.get("communicators", ()):
            self._communicators[int(row["pid"]), int(row["comm_hash"])] = np.array([row])

    def _add_end(self, table: str, row: Array | None, ended_ns: int) -> None:
        if row is not None:
            row["ended_ns"] = ended_ns
            self._ended.setdefault(table, []).append(row)

    def _with_ends(self, tables: Mapping[str, Array]) -> dict[str, Array]:
        """The tables that get end rows, with the end rows appended."""
        ended, self._ended = self._ended, {}
        return {
            name: np.concatenate([*([tables[name]] if name in tables else []), *rows])
            for name, rows in ended.items()
        }

    def _with_owners(self, tables: Mapping[str, Array], now_ns: int) -> dict[str, Array]:
        """From time to time, the owners of all processes: a restarted hub reads its latest rows only."""
        for row in tables.get("owners", ()):
            self._owners[int(row["pid"])] = np.array([row])
        if now_ns < self._owners_again_ns or not self._owners:
            return {}
        self._owners_again_ns = now_ns + _OWNERS_EVERY_NS
        rows = np.concatenate(list(self._owners.values()))
        rows["ts_ns"] = now_ns
        return {"owners": rows}

    def status(self) -> str:
        """The state of the connection, in a few words."""
        if not self._sender.complaint() and (reason := self._unanswered()):
            return f"hub away ({reason})"
        return self._sender.status()

    def complaint(self) -> str:
        """The reason why the hub accepts no data at present; empty while it accepts data."""
        return self._sender.complaint() or self._unanswered()

    def close(self) -> None:
        """Send the remaining rows for a few seconds; the rest waits on disk for the next agent."""
        self._sender.close(_LAST_S)
