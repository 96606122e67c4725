"""Inspector logs: the rank with the shortest time inside a collective entered last, on any clocks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope.errors import BadTrace
from stallscope.importers import importer_for
from stallscope.importers.inspector_log import IMPORTER
from stallscope.store import node

from ..diagnose.reports import only, report_of

N_RANKS, N_ROUNDS, START_US = 8, 60, 1_752_867_229_000_000


def record(rank: int, seq: int, inside_us: int, logged_us: int, **changes: Any) -> dict[str, Any]:
    return {
        "header": {"id": "0xe62dedaa97644a", "rank": rank, "n_ranks": N_RANKS, "nnodes": 2},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": logged_us,
            "hostname": f"host{rank // 4}",
            "pid": 400 + rank,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": seq,
            "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": inside_us,
            "coll_algobw_gbs": 1.0,
        }
        | changes,
    }


def written(folder: Path, late_us: dict[tuple[int, int], int]) -> Path:
    """Logs of a job of 20 ms steps, host1's clock 80 ms ahead. late_us: by (rank, round)."""
    folder.mkdir()
    lines: list[list[str]] = [[] for _ in range(N_RANKS)]
    now = START_US
    random = np.random.default_rng(1)
    for seq in range(N_ROUNDS):
        lateness = [late_us.get((rank, seq), 0) + int(random.integers(0, 120)) for rank in range(N_RANKS)]
        now += 20_000 + max(lateness) + 300
        for rank in range(N_RANKS):
            inside = 300 + max(lateness) - lateness[rank]
            logged = now + 400 + 80_000 * (rank // 4)
            lines[rank].append(json.dumps(record(rank, seq, inside, logged)))
    for rank in range(N_RANKS):
        (folder / f"host-pid{rank}.log").write_text("\n".join(lines[rank]) + "\n")
    return folder


def report(folder: Path):
    importer = importer_for(folder)
    assert importer is IMPORTER
    node.write(folder / "trace.db", importer.read(folder))
    return report_of(node.read(folder / "trace.db"))


def test_a_healthy_job_is_healthy(tmp_path):
    assert report(written(tmp_path / "log", {})).healthy


def test_the_rank_that_is_inside_for_the_shortest_time_is_named(tmp_path):
    late = {(5, seq): 15_000 for seq in range(8, N_ROUNDS, 6)}
    verdict = only(report(written(tmp_path / "log", late)))
    assert (verdict.kind, verdict.ranks, verdict.period_steps) == ("straggler", [5], 6)
    assert verdict.late_ms is not None
    assert verdict.late_ms["median"] == pytest.approx(15, rel=0.05)
    assert verdict.causes[0].cause.name == "not_recorded"


def test_a_line_that_a_killed_job_left_unfinished_is_left_out(tmp_path):
    folder = written(tmp_path / "log", {})
    file = folder / "host-pid0.log"
    file.write_text(file.read_text() + '{"header": {"id": "0xe6')
    assert len(IMPORTER.read(folder).collectives) == N_RANKS * N_ROUNDS


@pytest.mark.parametrize(
    "change",
    [
        {"coll_sn": -1},
        {"coll_exec_time_us": "soon"},
        {"coll_exec_time_us": 2**62},
        {"coll_msg_size_bytes": None},
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path, change):
    file = tmp_path / "bad.log"
    file.write_text(json.dumps(record(0, 1, 10, START_US, **change)))
    with pytest.raises(BadTrace) as caught:
        importer_for(file).read(file)
    assert "bad.log" in str(caught.value)
    assert "\n" not in str(caught.value)
