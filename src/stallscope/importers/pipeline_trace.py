"""Operation traces of pipeline-parallel jobs: a Parquet file with one row per operation of one worker.

Columns: step, rank, stage (of the pipeline), dp_rank (data-parallel replica), optype, start_ts and duration in
seconds, seq_id (n-th operation of its type in the step), mc (model chunk). start_ts counts from the beginning of
the step, so steps are placed one after the other on the time axis, without a wall clock.

Workers that take part in an operation follow from the type's name: params-* and grads-* among the replicas of a
stage, *-send and *-recv between neighbouring stages of a replica, embedding-* between its first and last stage.
The names of other operations do not show which workers take part; these operations become spans only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag, Op
from stallscope.events.trace import Trace
from stallscope.importers.parquet import coded, column_names, table
from stallscope.importers.registry import Importer, Unread

_NUMBERS = ("step", "rank", "stage", "dp_rank", "start_ts", "duration", "seq_id")
_COLUMNS = (*_NUMBERS, "optype")
_MAX_ROWS = 4_000_000
_MAX_KINDS = 1000
_MAX_SECONDS = 1e6  # of one step
_OPS = (  # the first entry that the type's name contains
    ("reduce-scatter", Op.REDUCE_SCATTER),
    ("all-gather", Op.ALL_GATHER),
    ("all-reduce", Op.ALL_REDUCE),
    ("clip", Op.ALL_REDUCE),  # the norm of all gradients is summed over all ranks
    ("send", Op.SEND),
    ("recv", Op.RECV),
    ("compute", Op.COMPUTE),
    ("optimizer", Op.COMPUTE),
    ("gc", Op.COMPUTE),
)


@dataclass(frozen=True)
class _Rows:
    """The operations, sorted by step, rank and begin; int64 (n,) each.

    step counts from 0, file_step as in the file. begin_ns and end_ns on the axis of all steps. kind: row of
    `kinds`, the distinct types. tensor_index: order of the rank in its stage and replica (tensor-parallel).
    """

    step: Array
    file_step: Array
    rank: Array
    stage: Array
    replica: Array
    tensor_index: Array
    kind: Array
    begin_ns: Array
    end_ns: Array
    seq: Array
    kinds: tuple[str, ...]

    def where(self, mask: Array) -> "_Rows":
        picked = {name: getattr(self, name)[mask] for name in self.__dataclass_fields__ if name != "kinds"}
        return _Rows(**picked, kinds=self.kinds)


def _accepts(file: Path, head: bytes) -> bool:
    return head[:4] == b"PAR1" and set(_COLUMNS) <= column_names(file)


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:4])
        raise BadTrace(f"got {len(files)} pipeline traces ({names}): give only one")
    rows = _rows(files[0])
    n_stages, n_replicas = int(rows.stage.max()) + 1, int(rows.replica.max()) + 1
    collectives = _collectives(rows, n_stages)
    return Trace(
        collectives=collectives,
        communicators=_communicators(collectives),
        processes=_processes(rows),
        spans=_spans(rows),
        ends_ns=(int(rows.end_ns.max()),),
        source=f"operation trace of a pipeline-parallel job ({files[0].name})",
        facts={"pipeline_stages": str(n_stages), "data_parallel_replicas": str(n_replicas)},
    )


def _rows(file: Path) -> _Rows:
    columns = table(file, _NUMBERS, max_rows=_MAX_ROWS)
    if not len(columns["step"]):
        raise BadTrace(f"{file} contains no operations")
    step, rank, stage, replica, seq = (
        _integers(columns[name], name, file) for name in ("step", "rank", "stage", "dp_rank", "seq_id")
    )
    begin_s, length_s = (_seconds(columns[name], name, file) for name in ("start_ts", "duration"))
    kind, kinds = coded(file, "optype", max_rows=_MAX_ROWS)
    if len(kinds) > _MAX_KINDS:
        raise BadTrace(f"{file} has {len(kinds):,} types of operation: check that it is a pipeline trace")
    steps, number = np.unique(step, return_inverse=True)
    begin_ns, end_ns = _on_one_axis(number, begin_s, begin_s + length_s, n_steps=len(steps))
    order = np.lexsort((begin_ns, rank, number))
    rows = _Rows(
        step=number.astype(np.int64),
        file_step=step,
        rank=rank,
        stage=stage,
        replica=replica,
        tensor_index=_tensor_indices(rank, stage, replica, file),
        kind=kind,
        begin_ns=begin_ns,
        end_ns=end_ns,
        seq=np.maximum(seq, 0),
        kinds=tuple(kinds),
    )
    return rows.where(order)


def _integers(column: Array, name: str, file: Path) -> Array:
    if not np.issubdtype(column.dtype, np.integer) or column.min() < -1 or column.max() >= 1 << 31:
        raise BadTrace(
            f"{file}: column {name} contains values that are not integers from 0 up: check that it is a pipeline trace"
        )
    return column.astype(np.int64)


def _seconds(column: Array, name: str, file: Path) -> Array:
    if not np.issubdtype(column.dtype, np.number) or np.issubdtype(column.dtype, np.complexfloating):
        raise BadTrace(f"{file}: column {name} does not contain numbers: check that it is a pipeline trace")
    seconds = column.astype(np.float64)
    if not np.isfinite(seconds).all() or seconds.min() < -1.0 or seconds.max() > _MAX_SECONDS:
        raise BadTrace(f"{file}: column {name} contains values that cannot be times in seconds within a step")
    return seconds


def _on_one_axis(step: Array, begin_s: Array, end_s: Array, *, n_steps: int) -> tuple[Array, Array]:
    """Begin and end in ns, each step placed after the end of the step before."""
    length = np.zeros(n_steps)
    np.maximum.at(length, step, end_s)
    base = np.concatenate([[0.0], np.cumsum(length)[:-1]])[step] - min(float(begin_s.min()), 0.0)
    begin_ns = np.rint((base + begin_s) * 1e9).astype(np.int64)
    return begin_ns, begin_ns + np.rint((end_s - begin_s) * 1e9).astype(np.int64)


def _tensor_indices(rank: Array, stage: Array, replica: Array, file: Path) -> Array:
    """The order of each row's rank among the ranks of its stage and replica."""
    if min(stage.min(), replica.min(), rank.min()) < 0 or max(stage.max(), replica.max()) >= 1 << 20:
        raise BadTrace(f"{file}: a rank, stage or replica is out of range: check that it is a pipeline trace")
    known = np.unique(np.stack([stage, replica, rank]), axis=1)
    ranks, counts = np.unique(known[2], return_counts=True)
    if (counts > 1).any():
        raise BadTrace(f"{file}: rank {ranks[counts > 1][0]} is in more than one stage or replica")
    begins = np.concatenate([[True], (np.diff(known[0]) != 0) | (np.diff(known[1]) != 0)])
    start = np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
    order = np.argsort(known[2])
    slot = (np.arange(len(begins)) - start)[order]
    return slot[np.searchsorted(known[2][order], rank)]


def _operation(kind: str) -> Op:
    return next((op for word, op in _OPS if word in kind), Op.NONE)


def _comm_hash(name: str, *slot: int) -> int:
    identity = f"pipeline trace {name} {slot}"
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "little")


def _hashes(name: str, first: Array, second: Array) -> Array:
    """comm_hash for each pair of numbers: uint64 (n,)."""
    pairs, inverse = np.unique(np.stack([first, second]), axis=1, return_inverse=True)
    made = [_comm_hash(name, int(a), int(b)) for a, b in pairs.T]
    return np.array(made, np.uint64)[inverse.reshape(-1)]


def _spans(rows: _Rows) -> Array:
    spans = layout.empty(layout.SPANS, len(rows.step))
    spans["ts_ns"], spans["duration_ns"] = rows.begin_ns, rows.end_ns - rows.begin_ns
    spans["pid"], spans["step"] = rows.rank, rows.file_step
    spans["op"] = np.array([_operation(kind) for kind in rows.kinds])[rows.kind]
    spans["label"] = np.array([kind.encode()[:32] for kind in rows.kinds], "S32")[rows.kind]
    return spans


def _collectives(rows: _Rows, n_stages: int) -> Array:
    parts = [_of_kind(rows.where(rows.kind == i), kind, n_stages) for i, kind in enumerate(rows.kinds)]
    result = np.concatenate(parts)
    return result[np.argsort(result["ts_ns"], kind="stable")]


def _of_kind(rows: _Rows, kind: str, n_stages: int) -> Array:
    """The operations of one type as collectives; none if the type does not show which workers take part."""
    op, peer = _operation(kind), np.full(len(rows.step), UNKNOWN)
    if op in (Op.SEND, Op.RECV):
        is_forward = not kind.startswith("backward")
        step = (1 if op == Op.SEND else -1) * (1 if is_forward else -1)
        hashes = _hashes("forward" if is_forward else "backward", rows.replica, rows.tensor_index)
        own, size, peer = rows.stage, n_stages, (rows.stage + step) % max(n_stages, 1)
    elif op not in (Op.NONE, Op.COMPUTE) and kind.startswith(("params-", "grads-")):
        hashes = _hashes(kind, rows.stage, rows.tensor_index)
        own, size = rows.replica, int(rows.replica.max(initial=0)) + 1
    elif op not in (Op.NONE, Op.COMPUTE) and kind.startswith("embedding-"):
        hashes = _hashes(kind, rows.replica, rows.tensor_index)
        own, size = (rows.stage > 0).astype(np.int64), 2
    else:
        return layout.empty(layout.COLLECTIVES)
    out = layout.empty(layout.COLLECTIVES, len(rows.step))
    out["ts_ns"], out["pid"], out["op"] = rows.begin_ns, rows.rank, op
    out["comm_hash"], out["comm_rank"], out["nranks"], out["peer_rank"] = hashes, own, size, peer
    out["seq"] = rows.step * (int(rows.seq.max(initial=0)) + 1) + rows.seq
    out["gpu_start_ns"], out["gpu_end_ns"] = rows.begin_ns, rows.end_ns
    out["flags"] = CollectiveFlag.NO_LEDGER
    return out


def _communicators(calls: Array) -> Array:
    _, first = np.unique(calls[["comm_hash", "pid"]], return_index=True)
    out = layout.empty(layout.COMMUNICATORS, len(first))
    for name in ("ts_ns", "pid", "comm_hash", "comm_rank", "nranks"):
        out[name] = calls[name][first]
    return out


def _processes(rows: _Rows) -> Array:
    ranks, first = np.unique(rows.rank, return_index=True)
    out = layout.empty(layout.PROCESSES, len(ranks))
    out["ts_ns"], out["pid"], out["rank"] = rows.begin_ns[first], ranks, ranks
    return out


IMPORTER = Importer("pipeline trace", _accepts, _read)
