"""Recording folders made by hand, event by event, as the documented Parquet columns want them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MS = 1_000_000
WORDS = 7
COLUMNS = {
    "ts_ns": pa.int64(),
    "pid": pa.uint32(),
    "tid": pa.uint32(),
    "cpu": pa.uint16(),
    "kind": pa.string(),
    "symbol": pa.string(),
    **{f"a{i}": pa.uint64() for i in range(WORDS)},
    "preempt": pa.bool_(),
    "comm": pa.string(),
}
FLOAT32, SUM = 7, 0  # ncclDataType_t, ncclRedOp_t


class Recording:
    """Collects events and writes the folder. Times are in microseconds from the begin."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, us: float, pid: int, kind: str, symbol: str = "", *words: int, **rest: Any) -> None:
        """One event; tid: the process's main thread by default."""
        row = {
            "ts_ns": 10**9 + int(us * 1000),
            "pid": pid,
            "tid": pid,
            "cpu": 0,
            "kind": kind,
            "symbol": symbol,
        }
        row |= {f"a{i}": words[i] % (1 << 64) if i < len(words) else 0 for i in range(WORDS)}
        self.rows.append(row | {"preempt": False, "comm": "python"} | rest)

    def call(
        self, us: float, until_us: float | None, pid: int, symbol: str, *words: int, **rest: Any
    ) -> None:
        """A call: entry with its arguments, and return; until_us None: it never returns."""
        self.add(us, pid, "enter", symbol, *words, **rest)
        if until_us is not None:
            self.add(until_us, pid, "return", symbol, 0, **rest)

    def init(self, us: float, pid: int, *, handle: int, unique: int, rank: int, nranks: int) -> None:
        """A communicator is made."""
        words = (0, nranks, rank, 0, 0, 0, unique)
        self.add(us, pid, "enter", "ncclCommInitRankConfig", *words)
        self.add(us + 5, pid, "return", "ncclCommInitRankConfig", 0, handle)

    def all_reduce(self, us: float, pid: int, handle: int, count: int = 1000, **rest: Any) -> None:
        """A rank enters an all-reduce of floats."""
        self.call(us, us + 20, pid, "ncclAllReduce", 1, 2, count, FLOAT32, SUM, handle, 77, **rest)

    def off(
        self, us: float, on_us: float | None, pid: int, *, state: int, nr: int = 0, by: int = 5, **rest: Any
    ) -> None:
        """The main thread leaves the CPU, and comes back."""
        preempt = rest.pop("preempt", False)
        self.add(
            us, pid, "sched_switch", "", pid, by, pid, by, state, nr, preempt=preempt, comm="other", **rest
        )
        if on_us is not None:
            self.add(on_us, by, "sched_switch", "", by, pid, by, pid, 0, 0, comm="python", **rest)

    def write(self, folder: Path, *, truth: dict[str, Any] | None = None) -> Path:
        """Write events.parquet, and truth.json if it is given."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = sorted(self.rows, key=lambda row: row["ts_ns"])
        columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in COLUMNS.items()}
        pq.write_table(pa.table(columns), folder / "events.parquet")
        if truth is not None:
            (folder / "truth.json").write_text(json.dumps(truth))
        return folder


def two_ranks(n_steps: int = 3) -> Recording:
    """Two processes, one communicator, an all-reduce and a wait in each step."""
    made = Recording()
    for rank, pid in enumerate((11, 12)):
        made.init(100, pid, handle=0xA0 + rank, unique=0xBEEF, rank=rank, nranks=2)
        for step in range(n_steps):
            begin = 1000 * (step + 1) + rank
            made.all_reduce(begin, pid, 0xA0 + rank, 1000 + step)
            made.call(begin + 50, begin + 400, pid, "cudaStreamSynchronize", 77)
    return made


def with_column(folder: Path, name: str, values: Any) -> None:
    """Replace a column of the events; None drops it."""
    path = folder / "events.parquet"
    table = pq.read_table(path)
    at = table.column_names.index(name)
    table = table.remove_column(at) if values is None else table.set_column(at, name, pa.array(values))
    pq.write_table(table, path)


def column(folder: Path, name: str) -> np.ndarray:
    """A column of the events."""
    return pq.read_table(folder / "events.parquet").column(name).to_numpy()
