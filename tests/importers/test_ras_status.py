"""Answers of NCCL's RAS service: a rank that stays behind is named, a call in flight is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from stallscope.errors import BadTrace
from stallscope.importers import importer_for
from stallscope.importers.ras_status import IMPORTER
from stallscope.store import node

from ..diagnose.reports import only, report_of


def answer(
    counts: dict[int, int], at: str, missing: dict[int, str] | None = None, size: int = 32
) -> dict[str, Any]:
    """An answer about one communicator. counts: all-reduces by rank; missing: RAS's statement on a rank, by rank."""
    ranks = [
        {
            "rank": rank,
            "host": f"10.0.0.{rank // 8}",
            "pid": 1000 + rank,
            "cuda_dev": rank % 8,
            "nvml_dev": rank % 8,
            "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
            "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllReduce": n},
        }
        for rank, n in counts.items()
    ]
    lost = [
        {
            "rank": r,
            "host": f"10.0.0.{r // 8}",
            "pid": 1000 + r,
            "status": {"considered_dead": what == "dead"},
        }
        for r, what in (missing or {}).items()
    ]
    comm = {
        "hash": "0xae94423cfbb2ef4a",
        "size": size,
        "ranks_count": len(ranks),
        "ranks": ranks,
        "missing_ranks": lost,
    }
    return {"nccl_version": "2.29.1", "timestamp": at, "communicators_count": 1, "communicators": [comm]}


def report(folder: Path, *answers: dict[str, Any]):
    folder.mkdir()
    for i, output in enumerate(answers):
        (folder / f"{i}.json").write_text(json.dumps(output, indent=2))
    importer = importer_for(folder)
    assert importer is IMPORTER
    node.write(folder / "trace.db", importer.read(folder))
    return report_of(node.read(folder / "trace.db"))


UNEVEN = dict.fromkeys(range(32), 640) | {3: 641, 17: 641}


def test_a_single_answer_with_uneven_ranks_is_inconclusive(tmp_path):
    assert report(tmp_path / "once", answer(UNEVEN, "2026-06-19 06:51:56")).answer == "inconclusive"


def test_the_majority_is_not_named_when_two_ranks_are_ahead_and_all_stall(tmp_path):
    answers = [answer(UNEVEN, f"2026-06-19 06:51:{second}") for second in (10, 40)]
    verdict = only(report(tmp_path / "twice", *answers))
    assert (verdict.kind, verdict.ranks) == ("hang", [])
    assert verdict.evidence.ahead == [3, 17]


def test_a_job_that_moves_is_healthy(tmp_path):
    later = {rank: n + 50 for rank, n in UNEVEN.items()}
    assert report(
        tmp_path / "moves", answer(UNEVEN, "2026-06-19 06:51:10"), answer(later, "2026-06-19 06:51:40")
    ).healthy


def test_a_dead_rank_is_named_at_once(tmp_path):
    counts = dict.fromkeys([r for r in range(32) if r != 21], 700)
    verdict = only(report(tmp_path / "dead", answer(counts, "2026-06-19 06:51:10", {21: "dead"})))
    assert (verdict.kind, verdict.ranks) == ("hang", [21])


def test_a_rank_without_an_answer_that_ras_calls_alive_is_not_accused(tmp_path):
    counts = dict.fromkeys([r for r in range(32) if r != 21], 700)
    assert (
        report(tmp_path / "slow", answer(counts, "2026-06-19 06:51:10", {21: "slow"})).answer
        == "inconclusive"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": "yesterday"},
        {"communicators": [{"hash": "zz", "size": 2}]},
        {"communicators": [{"hash": "0x1", "size": 2, "ranks": [{"rank": -7}]}]},
        {"communicators": 3},
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path, change):
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(answer({0: 1}, "2026-06-19 06:51:10") | change))
    with pytest.raises(BadTrace) as caught:
        importer_for(file).read(file)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)
