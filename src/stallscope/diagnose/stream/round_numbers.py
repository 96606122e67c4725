"""Corrected rounds of ranks that were attached late, with the shifts that an earlier evaluation found (see sequences).

Finding the shifts is the slowest step of an evaluation, and they stay valid. They are computed again while they rest on
few rows.
"""

from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.arrays.row_order import RowsInOrder
from stallscope.diagnose.timeline.late_attach import is_counted_late, renumbered
from stallscope.events.layout import Array
from stallscope.events.names import P2P_OPS

_SURER = 2  # computed again with this many times the rows

Unit = tuple[int, ...]
"""The calls of one process on one communicator: node, pid, hash or address, and for point-to-point op and peer."""


@dataclass
class Numbering:
    """The shifts of a job's rounds.

    shifts: by unit, the shift of seq, the communicator and its size. n_rows: number of rows from which they follow.
    """

    shifts: dict[Unit, tuple[int, int, int]] = field(default_factory=dict)
    n_rows: int = 0

    def corrected(self, rows: Array) -> Array | None:
        """The rows with the rounds of earlier evaluations; None where a shift is unknown or rests on too few rows.

        rows: COLLECTIVES sorted by node, pid, time.
        """
        if not has_late_ranks(rows):
            return rows
        unit, first = _units(rows)
        known = [self.shifts.get(_key(rows[row])) for row in first.tolist()]
        if len(rows) >= _SURER * self.n_rows or None in known:
            return None
        shift, comm, size = (
            np.array(part)
            for part in zip(*(shift_of_unit for shift_of_unit in known if shift_of_unit), strict=True)
        )
        out = rows.copy()
        out["seq"] += shift[unit]
        out["comm_hash"], out["nranks"] = comm.astype(np.uint64)[unit], size[unit]
        return out

    def matched(self, rows: Array) -> Array:
        """The rows with matching rounds: by earlier shifts, or by shifts that are found now.

        rows: COLLECTIVES sorted by node, pid, time.
        """
        corrected = self.corrected(rows)
        if corrected is not None:
            return corrected
        process, _ = numbered(rows["node"], rows["pid"])
        columns = renumbered(RowsInOrder(rows, None, {}), process, ())
        self.note(rows, RowsInOrder(rows, None, columns))
        out = rows.copy()
        for name, column in columns.items():
            out[name] = column
        return out

    def note(self, before: Array, after: RowsInOrder) -> None:
        """Keep the shifts that an evaluation found. before, after: the same rows without and with corrected rounds."""
        _, first = _units(before)
        for row in first.tolist():
            now = after[row]
            shift = int(now["seq"]) - int(before["seq"][row])
            self.shifts[_key(before[row])] = shift, int(now["comm_hash"]), int(now["nranks"])
        self.n_rows = len(before)


def has_late_ranks(rows: Array) -> bool:
    """Whether the rounds of a rank count from the attach."""
    return bool(is_counted_late(rows["flags"]).any())


def _units(rows: Array) -> tuple[Array, Array]:
    """Number of each row's unit, and a row of each unit."""
    is_p2p = np.isin(rows["op"], P2P_OPS)
    handle = np.where(rows["comm_hash"] == 0, rows["comm_handle"], rows["comm_hash"])
    op, peer = (np.where(is_p2p, rows[name], 0) for name in ("op", "peer_rank"))
    unit, n = numbered(rows["node"], rows["pid"], handle, op, peer)
    first = np.zeros(n, np.int64)
    first[unit[::-1]] = np.arange(len(rows))[::-1]
    return unit, first


def _key(row: Array) -> Unit:
    is_p2p = row["op"] in P2P_OPS
    handle = int(row["comm_hash"]) or int(row["comm_handle"])
    ends = (int(row["op"]), int(row["peer_rank"])) if is_p2p else (0, 0)
    return int(row["node"]), int(row["pid"]), handle, *ends
