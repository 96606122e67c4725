"""`stallscope compare` and `gate`: a job before and after a fault."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.builders import MS, dp_trace, every

from stallscope.store import node


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A healthy job, and the same job with a rank that is 50 ms late in every seventh step."""
    folder = tmp_path_factory.mktemp("compare")
    healthy, slow = folder / "healthy.db", folder / "slow.db"
    node.write(healthy, dp_trace())
    node.write(slow, dp_trace(every(2, 7, 50 * MS)))
    return healthy, slow


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The healthy and the slow job without the data of 8 of 12 ranks."""
    folder = tmp_path_factory.mktemp("incomplete")
    paths = folder / "healthy.db", folder / "slow.db"
    for path, trace in zip(paths, (dp_trace(), dp_trace(every(2, 7, 50 * MS))), strict=True):
        processes = trace.processes.copy()
        processes["nranks"] = 12
        node.write(path, replace(trace, processes=processes))
    return paths


@pytest.mark.parametrize("position", [0, 1])
def test_incomplete_data_on_either_side_show_no_absence_of_a_regression(run, traces, incomplete, position):
    jobs = [traces[0], traces[0]]
    jobs[position] = incomplete[0]
    code, out, _ = run("compare", *jobs)
    name = ("before", "after")[position]
    assert code == 21
    assert out.endswith(f"Inconclusive: {name}: 8 of 12 ranks are not in this trace.\n")
    assert json.loads(run("compare", *jobs, "--json")[1])["answer"] == "inconclusive"


def test_incomplete_data_with_a_fault_show_no_absence_of_another_fault(run, incomplete, tmp_path):
    slow = incomplete[1]
    code, out, _ = run("compare", slow, slow)
    assert (code, "8 of 12 ranks" in out) == (21, True)
    code, out, _ = run("gate", slow, "--max-late-ms", "100")
    assert (code, out) == (21, "gate: inconclusive: 8 of 12 ranks are not in this trace\n")
    (tmp_path / "saved.json").write_text(run("explain", slow, "--json")[1])
    assert run("compare", tmp_path / "saved.json", slow)[0] == 21


def test_incomplete_data_can_show_a_regression_and_an_excess(run, incomplete):
    assert run("compare", *incomplete)[0] == 23
    assert run("gate", incomplete[1], "--max-late-ms", "5")[0] == 23


def report(tmp_path: Path, kind: str, cost: dict[str, object] | None) -> Path:
    """A saved report on 4 ranks over 100 s with one verdict without lateness."""
    verdict = {
        "kind": kind,
        "summary": f"A {kind}.",
        "ranks": [1],
        "causes": [],
        "cost": cost,
        "late_ms": None,
    }
    path = tmp_path / f"{kind}.json"
    examined = {"n_ranks": 4, "seconds": 100.0, "n_steps": 50}
    path.write_text(json.dumps({"answer": "found", "examined": examined, "verdicts": [verdict], "gaps": []}))
    return path


@pytest.mark.parametrize("kind", ["hang", "mismatch", "failure"])
def test_job_that_stopped_exceeds_every_limit(run, traces, tmp_path, kind):
    saved = report(tmp_path, kind, None)
    code, out, _ = run("gate", saved, "--max-late-ms", "1000000")
    assert (code, out) == (23, f"gate: the job makes no progress: A {kind}.\n")
    assert run("compare", traces[1], saved)[0] == 23


@pytest.mark.parametrize(
    ("cost", "limit_percent", "code", "text"),
    [
        (None, 50, 21, "the lost GPU time of the fault is not known"),
        ({"gpu_seconds": 40.0}, 50, 0, "within the limits"),
        ({"gpu_seconds": 40.0, "is_lower_bound": True}, 50, 21, "10.0 % or more"),
        ({"gpu_seconds": 40.0, "at_most_gpu_seconds": 240.0}, 50, 21, "10.0 % to 60.0 %"),
        ({"gpu_seconds": 40.0, "at_most_gpu_seconds": 80.0}, 50, 0, "within the limits"),
        ({"gpu_seconds": 40.0, "is_lower_bound": True}, 5, 23, "10.0 % exceeds 5.0 %"),
    ],
)
def test_gate_respects_the_bounds_of_the_cost(run, tmp_path, cost, limit_percent, code, text):
    actual, out, _ = run("gate", report(tmp_path, "device", cost), "--max-lost", limit_percent)
    assert (actual, text in out) == (code, True), out


def test_fault_is_a_regression_with_its_rank(run, traces):
    code, out, _ = run("compare", *traces)
    assert code == 23
    assert "Regression: a step takes" in out
    assert "rank 2" in out


def test_a_removed_fault_is_not_a_regression(run, traces):
    healthy, slow = traces
    code, out, _ = run("compare", slow, healthy)
    assert code == 0
    assert out.endswith("No regression.\n")


def test_saved_report_is_a_baseline(run, traces, tmp_path):
    healthy, slow = traces
    (tmp_path / "before.json").write_text(run("explain", healthy, "--json")[1])
    code, out, _ = run("compare", tmp_path / "before.json", slow, "--json")
    assert code == 23
    data = json.loads(out)
    assert (data["before"]["answer"], data["after"]["ranks"]) == ("healthy", [2])


def test_budget_of_one_side_is_not_a_change(run, traces, tmp_path):
    saved = report(tmp_path, "device", {"gpu_seconds": 40.0})
    data = json.loads(run("compare", saved, traces[0], "--json")[1])
    assert (data["before"]["budget"], data["budget_change"]) == ({}, {})
    assert data["after"]["budget"]


def test_growth_below_the_limit_is_accepted(run, traces):
    code, out, _ = run("compare", *traces, "--max-growth", "100000")
    assert "a step takes" not in out
    assert code == 23  # the fault still loses GPU time


@pytest.mark.parametrize("name", ["absent.db", "absent.db@14:00..15:00"])
def test_missing_trace_is_one_line(run, traces, tmp_path, name):
    code, _, errors = run("compare", traces[0], tmp_path / name)
    assert code != 0
    assert errors.count("\n") == 1
    assert "no trace at" in errors


@pytest.mark.parametrize(
    ("which", "words", "code", "text"),
    [
        (0, ["--max-late-ms", "5"], 0, "gate: within the limits\n"),
        (1, ["--max-late-ms", "100"], 0, "gate: within the limits\n"),
        (1, ["--max-late-ms", "5"], 23, "lateness"),
        (1, ["--max-lost", "1"], 23, "lost GPU time"),
        (1, ["--max-usd-per-hour", "0.01", "--usd-per-gpu-hour", "3"], 23, "cost $"),
    ],
)
def test_gate_compares_with_the_limits(run, traces, which, words, code, text):
    actual, out, _ = run("gate", traces[which], *words)
    assert actual == code
    assert text in out
    assert out.count("\n") == 1


def test_gate_needs_a_limit_and_a_price(run, traces):
    assert "gate needs a limit" in run("gate", traces[0])[2]
    assert "needs a price" in run("gate", traces[0], "--max-usd-per-hour", "1")[2]


def test_an_inconclusive_job_before_shows_no_regression(run, traces):
    saved = json.loads(run("explain", traces[0], "--json")[1])
    saved |= {"answer": "inconclusive", "gaps": [{"reason": "nothing was examined", "action": ""}]}
    saved |= {"examined": {"n_ranks": 4, "n_steps": 0, "seconds": 0.0}, "step_ms": None}
    before = traces[0].with_name("saved.json")
    before.write_text(json.dumps(saved))
    code, out, _ = run("compare", before, traces[1])
    assert (code, out.splitlines()[-1]) == (21, "Inconclusive: before: nothing was examined.")


@pytest.mark.parametrize(
    "words", [("compare", "", "x.db"), ("compare", "@..14:03", "x.db"), ("report", "job", "--trace", "")]
)
def test_an_empty_path_is_refused(run, words):
    code, _, err = run(*words)
    assert (code, "empty; check the variable" in err) == (2, True)
