"""Parts of a trace: by time, by rounds, by annotations; on every table, and without changing the file."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from stallscope.diagnose.engine import diagnose
from stallscope.errors import NotFound
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace
from stallscope.store import node
from stallscope.store.time_range import Part, narrow, windows

from ..diagnose.builders import EPOCH_NS, MS, dp_trace

STEP_ROUNDS = 3


def labelled(trace: Trace, *labels: tuple[int, int, str, str]) -> Trace:
    """The trace with labels (ts_ns, pid, label, value)."""
    rows = layout.empty(layout.ANNOTATIONS, len(labels))
    for i, (ts_ns, pid, label, value) in enumerate(labels):
        rows[i] = (ts_ns, 0, pid, label.encode(), value.encode())
    return replace(trace, annotations=rows)


def step_begins(trace: Trace, rank: int = 0) -> list[int]:
    own = trace.collectives[trace.collectives["pid"] == 1000 + rank]
    return [int(own["ts_ns"][i]) - 1 for i in range(0, len(own), STEP_ROUNDS)]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """40 steps, which rank 0 annotates as steps 100 to 139; the first 10 are in phase warm, then train."""
    plain = dp_trace()
    begins = step_begins(plain)
    steps = [(at, 1000, "step", str(100 + i)) for i, at in enumerate(begins)]
    phases = [(begins[0], 1000, "phase", "warm"), (begins[10], 1000, "phase", "train")]
    return labelled(plain, *steps, *phases)


@pytest.fixture(scope="module")
def db(trace, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("part") / "trace.db"
    node.write(path, trace)
    return path


def rounds_of(db: Path, part: Part, rank: int = 0) -> set[int]:
    rows = node.read(db, part=part).collectives
    return set(rows["seq"][rows["pid"] == 1000 + rank].tolist())


def test_labels_come_back_as_they_were(db, trace):
    assert sorted(node.read(db).annotations.tolist()) == sorted(trace.annotations.tolist())


@pytest.mark.parametrize("steps", [(105, 109), (0, 104), (139, 1 << 62), (100, 139)])
def test_steps_are_the_annotated_steps_of_the_job(db, steps):
    low, high = max(steps[0], 100), min(steps[1], 139)
    assert rounds_of(db, Part(steps=steps)) == set(range((low - 100) * 3, (high - 99) * 3))


def test_a_phase_lasts_until_the_next(db):
    assert rounds_of(db, Part(phase="warm")) == set(range(30))
    assert rounds_of(db, Part(phase="train")) == set(range(30, 120))


def test_all_that_is_given_must_hold(db):
    assert rounds_of(db, Part(phase="train", steps=(105, 111))) == set(range(30, 36))
    assert rounds_of(db, Part(phase="warm", steps=(120, 130))) == set()


def test_the_last_rounds_are_counted(db):
    assert rounds_of(db, Part(last_rounds=5)) == set(range(115, 120))
    assert rounds_of(db, Part(last_rounds=10_000)) == set(range(120))


def test_wall_times_bound_it(db, trace):
    own = trace.collectives[trace.collectives["pid"] == 1000]
    begin, end = int(own["ts_ns"][30]), int(own["ts_ns"][60])
    rounds = rounds_of(db, Part(from_wall_ns=begin + EPOCH_NS, to_wall_ns=end + EPOCH_NS))
    assert rounds == set(range(30, 60))
    assert rounds_of(db, Part(to_wall_ns=begin + EPOCH_NS)) == set(range(30))


def test_a_start_after_the_end_of_the_trace_is_an_error_with_the_end(db, trace):
    last_ns = int(trace.collectives["ts_ns"].max()) + EPOCH_NS
    end = datetime.fromtimestamp(last_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M")
    with pytest.raises(NotFound, match=f"the trace ends at {end}"):
        node.read(db, part=Part(from_wall_ns=last_ns + 3600 * 10**9))


def test_events_after_a_part_are_excluded_from_it(trace, tmp_path):
    """The capture ends with the part, and who has ended later runs: a job cut in the middle does not hang."""
    rows = trace.processes.copy()
    first_ns, last_ns = trace.collectives["ts_ns"].min(), int(trace.collectives["ts_ns"].max())
    rows["ended_ns"] = (first_ns + MS, last_ns + MS, last_ns + MS, UNKNOWN)
    db = tmp_path / "long.db"
    node.write(db, replace(trace, processes=rows, ends_ns=(last_ns + 60_000 * MS,)))
    middle_ns = int(np.median(trace.collectives["ts_ns"]))
    part = node.read(db, part=Part(to_wall_ns=middle_ns + EPOCH_NS))
    assert part.ends_ns == (middle_ns,)
    assert part.processes["ended_ns"].tolist() == [first_ns + MS, UNKNOWN, UNKNOWN, UNKNOWN]
    assert diagnose(part).healthy
    whole = node.read(db, part=Part(from_wall_ns=middle_ns + EPOCH_NS))
    assert whole.ends_ns == (last_ns + 60_000 * MS,)
    assert whole.processes["ended_ns"].tolist() == rows["ended_ns"].tolist()


def test_a_part_keeps_all_processes(db):
    assert len(node.read(db, part=Part(steps=(105, 105))).processes) == 4


def test_another_node_takes_the_steps_by_wall_time(tmp_path):
    plain = dp_trace(node=(0, 0, 1, 1), offset_ns=(0, 5_000 * MS))
    begins = step_begins(plain)
    node.write(
        tmp_path / "two.db", labelled(plain, *((at, 1000, "step", str(i)) for i, at in enumerate(begins)))
    )
    for rank in (0, 3):
        rounds = rounds_of(tmp_path / "two.db", Part(steps=(5, 6)), rank)
        assert rounds >= set(range(16, 21))
        assert rounds <= set(range(14, 22))


def test_selecting_a_missing_step_or_phase_is_an_error(db, tmp_path):
    node.write(tmp_path / "plain.db", dp_trace(n_steps=5))
    for part, words in (
        (Part(steps=(7, 9)), "no step 7 to 9"),
        (Part(phase="evaluation"), "warm, train"),
    ):
        with pytest.raises(NotFound, match=words):
            node.read(db, part=part)
        with pytest.raises(NotFound, match="annotate"):
            node.read(tmp_path / "plain.db", part=part)


def test_the_file_is_not_changed(db):
    before = db.read_bytes()
    with node.reading(db) as connection:
        narrow(connection, windows(connection, Part(steps=(105, 109))))
        of_rank_0 = "SELECT count(*) FROM collectives WHERE pid = 1000"
        assert connection.execute(of_rank_0).fetchone() == (15,)
        assert connection.execute("SELECT count(*) FROM main.collectives").fetchone() == (4 * 120,)
    assert db.read_bytes() == before
