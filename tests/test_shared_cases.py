"""Small inputs with known answers, from the shared data: imported, explained, and compared with expected.json.

Each folder is an input of `stallscope import`; `traces/*.db` are inputs of `stallscope explain`. A case that fails
today is in KNOWN_FAILURES with its owner; a case that passes must leave the table.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = Path(os.environ.get("STALLSCOPE_DATA") or ROOT.parent / "shared") / "cases"
ACCUSING = ("straggler", "hang", "mismatch", "device", "failure")
ANSWERS = (0, 20, 21)
"""Exit codes of `explain`: healthy, found, inconclusive."""

KNOWN_FAILURES: dict[str, str] = {}

pytestmark = pytest.mark.shared


def _expected() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for prefix, folder in (("", CASES), ("traces/", CASES / "traces")):
        file = folder / "expected.json"
        if file.exists():
            cases |= {prefix + name: wanted for name, wanted in json.loads(file.read_text()).items()}
    return cases


EXPECTED = _expected()


@dataclass(frozen=True)
class Answer:
    """The JSON and the text of `explain` on a case."""

    data: dict[str, Any]
    text: str

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return list(self.data["verdicts"])

    @property
    def accused(self) -> set[int]:
        return {rank for v in self.verdicts if v["kind"] in ACCUSING for rank in v["ranks"]}

    @property
    def is_unknown(self) -> bool:
        return not self.data["healthy"] and not self.accused

    @property
    def first(self) -> dict[str, Any]:
        return (
            self.verdicts[0]
            if self.verdicts
            else {"causes": [{"cause": None}], "late_ms": None, "cost": None}
        )


def _cost_is_right(verdict: dict[str, Any], true_gpu_s: float) -> bool:
    cost = verdict["cost"]
    if cost is None:
        return False
    low, high = cost["gpu_seconds"], cost["at_most_gpu_seconds"]
    high = low if high is None else high
    return bool(low * 0.9 <= true_gpu_s <= high * 1.1 and high <= 3 * true_gpu_s)


CHECKS: dict[str, Callable[[Answer, Any], bool]] = {
    "imports": lambda answer, wanted: True,  # the import succeeded
    "healthy": lambda answer, wanted: answer.data["healthy"] is wanted,
    "named": lambda answer, wanted: answer.accused == set(wanted),
    "named_not": lambda answer, wanted: not answer.accused & set(wanted),
    "named_or_unknown": lambda answer, wanted: answer.accused == set(wanted) or answer.is_unknown,
    "healthy_or_unknown": lambda answer, wanted: all(v["kind"] == "inconclusive" for v in answer.verdicts),
    "nobody_accused": lambda answer, wanted: not answer.accused,
    "not_healthy_without_steps": lambda answer, wanted: (
        not answer.data["healthy"] or answer.data["examined"]["n_steps"] > 0
    ),
    "cause": lambda answer, wanted: any(
        v["causes"] and v["causes"][0]["cause"] in wanted for v in answer.verdicts
    ),
    "cause_not": lambda answer, wanted: (
        not {part["cause"] for v in answer.verdicts for part in v["causes"]} & set(wanted)
    ),
    "kinds": lambda answer, wanted: {v["kind"] for v in answer.verdicts} == set(wanted),
    "period_steps": lambda answer, wanted: answer.first.get("period_steps") == wanted,
    "n_rounds": lambda answer, wanted: answer.data["examined"]["n_rounds"] == wanted,
    "n_steps": lambda answer, wanted: answer.data["examined"]["n_steps"] == wanted,
    "n_ranks": lambda answer, wanted: answer.data["examined"]["n_ranks"] == wanted,
    "late_ms": lambda answer, wanted: (
        answer.first["late_ms"] is not None and wanted[0] <= answer.first["late_ms"]["median"] <= wanted[1]
    ),
    "cost_gpu_s": lambda answer, wanted: _cost_is_right(answer.first, wanted),
    "remark": lambda answer, wanted: bool(answer.verdicts or answer.data["benign"]),
    "text_not": lambda answer, wanted: not any(phrase in answer.text for phrase in wanted),
}


@pytest.fixture
def explained(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[[str], Answer]:
    """Imports a case, or opens its trace, and gives the answer of `explain`."""

    def answer(name: str) -> Answer:
        path, db = CASES / name, tmp_path / "trace.db"
        if name.startswith("traces/"):
            db = path.with_name(path.name + ".db")
        else:
            code, _, errors = run("import", path, "--db", db)
            assert code == 0, f"the import failed: {errors.strip()}"
        code, out, errors = run("explain", "--json", "--db", db)
        assert code in ANSWERS, errors
        return Answer(json.loads(out), run("explain", "--db", db)[1])

    return answer


def _parameters() -> list[Any]:
    return [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(reason=KNOWN_FAILURES[name], strict=True)]
            if name in KNOWN_FAILURES
            else [],
        )
        for name in EXPECTED
    ] or [pytest.param("none")]


@pytest.mark.parametrize("name", _parameters())
def test_the_answer_on_a_case_is_as_expected(name: str, explained: Callable[[str], Answer]) -> None:
    answer = explained(name)
    wrong = {
        key: wanted
        for key, wanted in EXPECTED[name].items()
        if key != "what" and not CHECKS[key](answer, wanted)
    }
    assert not wrong, f"{wrong} expected of {EXPECTED[name]['what']!r}; printed:\n{answer.text}"


def test_every_known_failure_is_a_case(shared: Path) -> None:
    assert not KNOWN_FAILURES.keys() - EXPECTED.keys()
