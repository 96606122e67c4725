"""Files of several tools on one job: one report, in which failures of the victims are not faults of their own."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from .generators import dumps, logs, profiles, stacks
from .generators.job import Job
from .launcher_job import Log, exception, interleaved, torchrun

JOB = Job(n_ranks=8, culprits=(5,), op="all_reduce", last_step=40)


def written(folder: Path, *parts: str, job: Job = JOB) -> Path:
    writers = {
        "dumps": dumps.FORMATS[0].write,
        "logs": logs.FORMATS[1].write,
        "stacks": stacks.FORMATS[0].write,
        "profiles": profiles.FORMATS[0].write,
    }
    for part in parts:
        (folder / part).mkdir(parents=True)
        writers[part](folder / part, job, Random(1))
    return folder


@pytest.mark.parametrize(
    "parts",
    [
        ("dumps", "profiles"),
        ("dumps", "stacks"),
        ("dumps", "profiles", "stacks"),
        ("logs", "dumps", "profiles", "stacks"),
    ],
)
def test_several_kinds_of_files_give_one_report(run, tmp_path: Path, parts: tuple[str, ...]):
    code, out, _ = run("explain", "--json", written(tmp_path / "job", *parts))
    report = json.loads(out)
    assert (code, report["answer"]) == (20, "found")
    assert {rank for verdict in report["verdicts"] for rank in verdict["ranks"]} == {5}
    assert report["examined"]["n_ranks"] == 8
    kinds = [verdict["kind"] for verdict in report["verdicts"]]
    assert len(set(kinds)) == len(kinds)


def test_a_dead_rank_explains_the_failures_of_the_others(run, tmp_path: Path):
    """Rank 3 raises and leaves no dump; the other ranks lose their connections."""
    folder = written(tmp_path / "job", "dumps", job=replace(JOB, culprits=(3,)))
    next(path for path in (folder / "dumps").iterdir() if re.search(r"_3$|rank3_", path.name)).unlink()
    log = Log()
    exception(log, 3)
    (folder / "job.log").write_text(interleaved(log, torchrun, 1))
    code, out, _ = run("explain", "--json", folder)
    report = json.loads(out)
    assert code == 20
    assert [(verdict["kind"], verdict["ranks"]) for verdict in report["verdicts"]] == [("failure", [3])]
    assert report["verdicts"][0]["victims"] == [rank for rank in range(8) if rank != 3]


def test_the_text_is_one_report_as_well(run, tmp_path: Path):
    code, out, _ = run("explain", written(tmp_path / "job", "dumps", "profiles"))
    assert code == 20
    assert out.count("Examined") == 1
