"""Logs of launchers: the rank that is behind or failed first is named, in every shape and under every prefix."""

from pathlib import Path

import pytest

from stallscope.diagnose.report.verdict import Report
from stallscope.importers import importer_for
from stallscope.importers.launcher_log import IMPORTER
from stallscope.store import node

from ..diagnose.reports import report_of
from .launcher_job import (
    PREFIXES,
    SHAPES,
    Log,
    chatter,
    exception,
    hang,
    interleaved,
    srun,
    summary,
    timeout,
    traceback,
)


def report(source: Path) -> Report:
    """Through the importer that the content asks for, and through a stored trace."""
    assert importer_for(source) is IMPORTER
    trace = IMPORTER.read(source)
    db = source.with_suffix(".db")
    node.write(db, trace)
    result = report_of(node.read(db))
    assert [v.ranks for v in result.verdicts] == [v.ranks for v in report_of(trace).verdicts]
    return result


def named(result: Report) -> set[int]:
    return {rank for verdict in result.verdicts if verdict.kind != "inconclusive" for rank in verdict.ranks}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("culprit", [0, 3, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_culprit_is_named(tmp_path: Path, shape: str, culprit: int, prefix: str):
    log = Log()
    SHAPES[shape](log, culprit)
    file = tmp_path / "slurm-77.out"
    file.write_text(interleaved(log, PREFIXES[prefix], seed=culprit))
    assert named(report(file)) == {culprit}


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_encodings_and_line_ends(tmp_path: Path, encoding: str, ends: str):
    log = Log()
    hang(log, 3)
    file = tmp_path / "job.log"
    text = "Größe\n" + interleaved(log, PREFIXES["torchrun"], 1)
    file.write_bytes(text.replace("\n", ends).encode(encoding))
    assert named(report(file)) == {3}


def test_tasks_of_srun_labels(tmp_path: Path):
    log = Log()
    exception(log, 5)
    file = tmp_path / "labelled.log"
    file.write_text("".join(f"{srun(rank, line)}\n" for rank, line in log.lines if rank >= 0))
    assert named(report(file)) == {5}


def test_one_file_per_rank(tmp_path: Path):
    log = Log()
    exception(log, 5)
    folder = tmp_path / "logs"
    for rank, line in log.lines:
        file = folder / (f"rank{rank}/stderr.log" if rank >= 0 else "launcher.log")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(line + "\n")
    assert named(report(folder)) == {5}


def test_the_operation_the_group_and_the_line_are_stated(tmp_path: Path):
    log = Log()
    hang(log, 2)
    file = tmp_path / "job.log"
    file.write_text(interleaved(log, PREFIXES["torchrun"], 1))
    (verdict,) = report(file).verdicts
    for words in ("allreduce [1024]", "default_pg", "train.py:88 step"):
        assert words in verdict.summary


def test_the_traceback_of_the_first_failure_is_stated(tmp_path: Path):
    log = Log()
    exception(log, 2)
    file = tmp_path / "job.log"
    file.write_text(interleaved(log, PREFIXES["torchrun"], 1))
    (verdict,) = report(file).verdicts
    assert verdict.kind == "failure"
    assert "DataLoader worker" in verdict.summary
    assert "data.py:41 load" in verdict.summary
    assert set(verdict.victims) == set(range(8)) - {2}


def test_a_group_of_some_ranks_is_compared_within_itself(tmp_path: Path):
    """Ranks 0, 1 and 2, 3 are groups; rank 3 is behind in its own, and group numbers are the same on all ranks."""
    log = Log(n_ranks=4)
    chatter(log)
    timeout(log, 2, seq=30, enqueued=31, group="22(TENSOR_MODEL_PARALLEL_GROUP)", own=0)
    for rank, n in ((0, 50), (1, 50), (3, 29)):
        group, own = ("21", rank) if rank < 2 else ("22", rank - 2)
        log.say(
            rank,
            f"[E1129 10:00:00.1 ProcessGroupNCCL.cpp:1746] [PG ID 1 PG GUID {group}(TENSOR_MODEL_PARALLEL_GROUP) Rank "
            f"{own}] Received a dump signal. Last enqueued NCCL work: {n}, last completed NCCL work: {n}.",
        )
    file = tmp_path / "job.log"
    file.write_text(interleaved(log, PREFIXES["torchrun"], 1))
    result = report(file)
    assert named(result) == {3}
    assert "TENSOR_MODEL_PARALLEL_GROUP" in result.verdicts[0].summary


def test_the_same_error_of_all_ranks_accuses_none(tmp_path: Path):
    log = Log()
    chatter(log)
    for rank in range(8):
        traceback(log, rank, f"ValueError: batch of 16 is not divisible by 3 (rank {rank})")
    summary(log, dict.fromkeys(range(8), 1), 0)
    file = tmp_path / "job.log"
    file.write_text(interleaved(log, PREFIXES["torchrun"], 1))
    result = report(file)
    assert not named(result)
    assert "ranks failed with the same error" in result.verdicts[0].summary


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_log_that_was_cut_off_accuses_no_other_rank(tmp_path: Path, share: float):
    log = Log()
    hang(log, 3)
    text = interleaved(log, PREFIXES["torchrun"], 1)
    file = tmp_path / "job.log"
    file.write_text(text[: int(len(text) * share)])
    assert named(report(file)) <= {3}


def test_chatter_alone_is_not_healthy(tmp_path: Path):
    log = Log()
    chatter(log)
    file = tmp_path / "job.log"
    file.write_text(interleaved(log, PREFIXES["torchrun"], 1))
    assert IMPORTER.read(file).coverage.gaps
