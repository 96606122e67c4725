"""The sums of time ledgers by sealed file change no answer."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.store.hub.rows import NOW_NS, appended, collectives

from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

N_RANKS, N_ROUNDS, SECOND_NS = 3, 35, 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    with closing(HubStore.open(tmp_path, Limits(maintenance_s=3600, settle_s=0, grace_s=0))) as opened:
        yield opened


def rows(seqs: range, rank: int) -> pa.Table:
    """Rounds in which the rank spends 5 ms on the CPU, and 1 ms per rank number in I/O."""
    out = collectives(list(seqs), rank=rank, nranks=N_RANKS)
    for name, each_ns in (("on_cpu_ns", 5_000_000), ("io_ns", rank * 1_000_000)):
        column = pa.array([seq * each_ns for seq in seqs], pa.int64())
        known = name in out.column_names
        out = (
            out.set_column(out.column_names.index(name), name, column)
            if known
            else out.append_column(name, column)
        )
    return out


@pytest.mark.parametrize("cluster", [None, "c1", "c2"])
@pytest.mark.parametrize(("first", "end"), [(None, None), (0, 20), (5, 25), (12, 14), (30, None)])
def test_every_window_gets_the_same_ledgers_as_from_the_rows(store: HubStore, cluster, first, end):
    """Three files of ten rounds, and five rounds that are not sealed."""
    for begin in range(0, N_ROUNDS, 10):
        seqs = range(begin, min(begin + 10, N_ROUNDS))
        appended(store, collectives=pa.concat_tables([rows(seqs, rank) for rank in range(N_RANKS)]))
        if begin < 30:
            store.seal_all()
    half_ns = SECOND_NS // 2  # between two rounds, so that the window cuts none
    params: dict[str, Any] = {
        "cluster": cluster,
        "from_ns": None if first is None else NOW_NS + first * SECOND_NS - half_ns,
        "to_ns": None if end is None else NOW_NS + end * SECOND_NS - half_ns,
    }
    ledgers = store.ask("rank_ledgers", tenant="a", params=params).to_pylist()
    n = (N_ROUNDS if end is None else end) - (first or 0)
    expected = [(rank, n, (n - 1) * 5_000_000, (n - 1) * rank * 1_000_000) for rank in range(N_RANKS)]
    result = [(row["rank"], row["n_rounds"], row["on_cpu_ns"], row["io_ns"]) for row in ledgers]
    assert result == ([] if cluster == "c2" else expected)
