"""The rows that an agent sends to a hub: the node's tables with wall-clock times and function names.

Two small tables come in addition to the tables of events/layout.py: clock readings, and lost records.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array, Field, Table
from stallscope.events.trace import Clock

CLOCKS = Table(
    "clocks",
    "A reading of the monotonic against the wall clock.",
    (
        Field("ts_ns", "i8", "wall time"),
        Field("monotonic_ns", "i8", "CLOCK_MONOTONIC of the same moment"),
        Field("error_ns", "i8", "half the width of the bracket"),
        Field(
            "is_synchronised", "i1", "1 the kernel reports a clock synchronised by NTP or PTP, 0 not", True
        ),
    ),
)
LOSSES = Table(
    "losses",
    "Records lost since the last row of this kind.",
    (
        Field("ts_ns", "i8", "time of detection"),
        Field("kind", "S32", "kind of record, or the stage that lost it"),
        Field("n_lost", "i8", "records"),
    ),
)
SYMBOL = Field("symbol", "S64", "exported function")

RANKS = (
    Field("rank", "i4", "rank in the job", True),
    Field("local_rank", "i4", "rank on the node", True),
)

TABLES = {
    table.name: table._replace(
        fields=(
            *(SYMBOL if field.name == "symbol" else field for field in table.fields if field.name != "node"),
            *(RANKS if table is layout.COLLECTIVES else ()),
        )
    )
    for table in (*layout.HUB_TABLES, CLOCKS, LOSSES)
}
"""The tables of a batch. They have no `node` column, since a batch carries the name of its one node.

A collective carries the ranks of its process, because queries on the hub select by rank.
"""

ON_MONOTONIC = frozenset(
    {"ts_ns", "ended_ns", "wait_enter_ns", "wait_leave_ns", "in_call_since_ns", "since_ns"}
    | {"noticed_ns", "oldest_ns", "oldest_progress_ns", "progress_ns"}
)
"""Times of the node's CLOCK_MONOTONIC. GPU times stay on the GPU's clock."""


def on_wall_clock(
    table: Table,
    rows: Array,
    clock: Clock,
    symbols: Sequence[str],
    *,
    ranks: Mapping[int, tuple[int, int]] | None = None,
) -> Array:
    """Rows of an events table (n,) in the form of a batch. clock: a fresh reading. symbols: names by table's number.

    ranks: known ranks and local ranks, by process.
    """
    to_wall_ns = clock.wall_ns - clock.monotonic_ns
    sent = np.zeros(len(rows), layout.dtype(TABLES[table.name]))
    for field in TABLES[table.name].fields:
        if field in RANKS:
            sent[field.name] = _ranks(rows["pid"], ranks or {}, RANKS.index(field))
            continue
        values = rows[field.name]
        if field.name == "symbol":
            values = np.array([symbols[number] for number in values.tolist()], field.format)
        elif field.name in ON_MONOTONIC:
            is_unknown = (values == UNKNOWN) if field.may_be_unknown else np.zeros(len(rows), bool)
            values = np.where(is_unknown, UNKNOWN, values + to_wall_ns)
        sent[field.name] = values
    return sent


def _ranks(pids: Array, ranks: Mapping[int, tuple[int, int]], which: int) -> Array:
    """The rank (which 0) or local rank (1) of each row's process."""
    known, index = np.unique(pids, return_inverse=True)
    values_by_process = np.array(
        [ranks.get(pid, (UNKNOWN, UNKNOWN))[which] for pid in known.tolist()], np.int32
    )
    return values_by_process[index]


def clock_row(clock: Clock, *, is_synchronised: bool | None) -> Array:
    """One row of CLOCKS."""
    kept = UNKNOWN if is_synchronised is None else int(is_synchronised)
    row = (clock.wall_ns, clock.monotonic_ns, clock.error_ns, kept)
    return np.array([row], layout.dtype(CLOCKS))


def loss_rows(wall_ns: int, lost: Mapping[str, int]) -> Array:
    """Rows of LOSSES: records by kind, without the kinds that lost nothing."""
    rows = [(wall_ns, kind.encode(), n) for kind, n in lost.items() if n]
    return np.array(rows, layout.dtype(LOSSES))
