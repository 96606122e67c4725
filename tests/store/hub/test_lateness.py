"""The sums of lateness that are kept by sealed file change no answer, and are worked out once."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.store.hub.rows import NOW_NS, appended, collectives

from stallscope.store.hub.file_sums import FileSums, split
from stallscope.store.hub.journal import Segment
from stallscope.store.hub.lateness import DEFAULT_MIN_LATE_NS
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

from .rows import maintained

N_RANKS, SECOND_NS = 3, 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    with closing(HubStore.open(tmp_path, Limits(maintenance_s=3600, settle_s=0, grace_s=0))) as opened:
        yield opened


def late_ns(seq: int, rank: int) -> int:
    return int(np.random.default_rng([seq, rank]).integers(0, 6_000_000))


def arrivals(seqs: Iterable[int], rank: int) -> list[pa.Table]:
    return [collectives([seq], rank=rank, nranks=N_RANKS, late_ns=late_ns(seq, rank)) for seq in seqs]


def filled(store: HubStore) -> None:
    """Three files of ten rounds, the last round of each without rank 2 until later; and five rounds not sealed."""
    for first in (0, 10, 20):
        n_rounds = (10, 10, 9)
        rows = [arrivals(range(first, first + n), rank) for rank, n in enumerate(n_rounds)]
        appended(store, collectives=pa.concat_tables(chain.from_iterable(rows)))
        store.seal_all()
    late = [*arrivals((9, 19), 2), *(row for rank in range(N_RANKS) for row in arrivals(range(30, 35), rank))]
    appended(store, collectives=pa.concat_tables(late))


def expected(
    from_ns: int | None, to_ns: int | None, min_late_ns: int
) -> dict[int, tuple[int, float, int, int]]:
    """By rank: rounds, mean and largest lateness, late rounds.

    The typical arrival of two ranks is the earlier, of three the middle.
    """
    result: dict[int, list[int]] = defaultdict(list)
    for seq in range(35):
        ranks = range(2 if seq == 29 else 3)
        arrivals = {rank: NOW_NS + seq * SECOND_NS + late_ns(seq, rank) for rank in ranks}
        typical_ns = min(arrivals.values()) if len(arrivals) == 2 else statistics.median(arrivals.values())
        for rank, at_ns in arrivals.items():
            if (from_ns is None or at_ns >= from_ns) and (to_ns is None or at_ns < to_ns):
                result[rank].append(int(at_ns - typical_ns))
    return {
        rank: (len(late), pytest.approx(statistics.mean(late)), max(late), sum(x > min_late_ns for x in late))
        for rank, late in result.items()
    }


def asked(store: HubStore, **params: Any) -> dict[int, tuple[int, float, int, int]]:
    defaults = {"cluster": None, "from_ns": None, "to_ns": None, "min_late_ns": DEFAULT_MIN_LATE_NS}
    rows = store.ask("lateness", tenant="a", params=defaults | params).to_pylist()
    return {row["rank"]: (row["n_rounds"], row["lag_ns"], row["max_late_ns"], row["n_late"]) for row in rows}


def test_every_window_and_limit_gets_the_same_answer_as_from_the_rows(store: HubStore):
    filled(store)
    windows = [(None, None), (0, 20), (5, 25), (20, 35), (12, 14), (10, None)]
    for (first, end), min_late_ns in product(windows, (0, DEFAULT_MIN_LATE_NS, 4_000_000)):
        half_ns = SECOND_NS // 2  # between two rounds, so that the window cuts none
        from_ns = None if first is None else NOW_NS + first * SECOND_NS - half_ns
        to_ns = None if end is None else NOW_NS + end * SECOND_NS - half_ns
        want = expected(from_ns, to_ns, min_late_ns)
        window = {"from_ns": from_ns, "to_ns": to_ns, "min_late_ns": min_late_ns}
        assert asked(store, **window) == want
        assert asked(store, **window, cluster="c1") == want
        assert asked(store, **window, cluster="c2") == {}


def test_a_file_is_summed_once_by_the_housekeeping_and_merged_files_again(
    store: HubStore, monkeypatch: pytest.MonkeyPatch
):
    filled(store)
    summed: list[str] = []
    worked_out = FileSums._computed

    def counted(self: FileSums, db: Any, segments: list[Segment], params: dict[str, int]) -> Any:
        if params:
            summed.extend(segment.path for segment in segments)
        return worked_out(self, db, segments, params)

    monkeypatch.setattr(FileSums, "_computed", counted)
    before = asked(store)
    assert len(summed) == 3
    maintained(store)
    assert asked(store) == before
    assert len(summed) == 3, "nothing is worked out again"
    for seq in range(40, 45):
        appended(store, collectives=collectives([seq], rank=0, nranks=1))
        store.seal_all()
    maintained(store)
    assert store.kept.merged_segments == 8
    n_before = len(summed)
    assert asked(store) == before
    assert len(summed) == n_before == 4, "the merged file was summed by the housekeeping"


def by_rank(sums: pa.Table) -> list[dict[str, Any]]:
    return sums.sort_by("rank").to_pylist()


def test_the_least_used_sums_are_forgotten_first(store: HubStore):
    filled(store)
    lateness = store._questions.lateness.by_file
    kept, params = FileSums(store.folder, lateness.sql, lateness.schema, 7), {"min_late_ns": 0}
    segments = store._hot.segments("a")["collectives"]
    with store._questions._reader.cursor() as db:
        first = kept.sums(db, segments, params)
        assert sum(len(each) for each in first) == 9
        assert [key[0] for key in kept._known] == [segment.path for segment in segments[1:]]
        again = kept.sums(db, segments, params)
        assert [by_rank(each) for each in again] == [by_rank(each) for each in first]
        kept.forget(segments)
        assert not kept._known and kept._n_rows == 0


def test_files_outside_a_window_are_left_out():
    def segment(first_ns: int | None, last_ns: int | None) -> Segment:
        return Segment("a", "collectives", f"{first_ns}", 1, 1, first_ns, last_ns, 0)

    before, edge, inside, after, untimed = (
        segment(*times) for times in ((0, 9), (5, 10), (10, 19), (20, 30), (None, None))
    )
    parts = split([before, edge, inside, after, untimed], 10, 20)
    assert parts.whole == (inside,) and parts.others == (edge,)
    assert split([before, after, untimed], None, None).whole == (before, after)
