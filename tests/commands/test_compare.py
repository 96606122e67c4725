"""`stallscope compare` and `gate`: a job before and after a fault."""

import json
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


def test_fault_is_a_regression_with_its_rank(run, traces):
    code, out, _ = run("compare", *traces)
    assert code == 23
    assert "Regression: a step takes" in out
    assert "rank 2" in out


def test_removed_fault_is_no_regression(run, traces):
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
