"""Compares a report with the truth: rank, cause, frequency, delay, and lost records.

The truth comes from the ranks' own clocks: by how much the batch and the fault of the disturbed steps took longer than
in the other steps of the same rank.
"""

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 0.1
CAUSE_SHARE = 0.8
MOVING = "imbalance"
_REPAID = (
    "alloc",
)  # faults that also make the forward pass longer: it allocates again what the fault has freed

Clock = NDArray[np.int64]
"""Rows of a rank's CSV: step, start_ns, begin_ns, forward_ns, end_ns, is_disturbed."""


@dataclass(frozen=True)
class Truth:
    """An injected fault. rank: None if it moved. delay_ms: median; None if no clock measured it."""

    name: str
    cause: str
    rank: int | None
    period: int | None
    delay_ms: float | None


@dataclass
class Judged:
    """One scenario. wrong: what differs from the truth, in words; nothing if all is right.

    late_ms: as reported, median. excess_ms: the rank's own excess, mean over its late steps; where ranks run ahead of
    the GPU, lateness adds up over several steps, but this does not.
    """

    scenario: str
    truths: list[Truth]
    said: str = ""
    late_ms: float | None = None
    excess_ms: float | None = None
    delay_error_percent: float | None = None
    share: float | None = None
    step_ms: float | None = None
    n_steps: int = 0
    n_lost: int = 0
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For results.json."""
        return asdict(self) | {"is_right": not self.wrong}


def clock(folder: Path, rank: int) -> Clock:
    """A rank's own clock; a line that was cut short is left out."""
    whole = (folder / f"rank{rank}.csv").read_text().rpartition("\n")[0]
    return np.loadtxt(io.StringIO(whole), np.int64, delimiter=",", skiprows=1, ndmin=2).reshape(-1, 6)


def truths(folder: Path) -> list[Truth]:
    """The injected fault and its rank."""
    data = json.loads((folder / "truth.json").read_text())
    result = []
    for fault in data["faults"]:
        every, rank = fault["every_steps"], fault["rank"]
        ranks = range(data["n_ranks"]) if rank is None else [rank]
        period = every if 1 < every < 1000 and rank is not None else None
        clocks = [clock(folder, entry) for entry in ranks]
        delay_ms = _delay_ms(clocks, data["stopped_ns"], is_repaid=fault["name"] in _REPAID)
        if fault["name"] == "gil":  # all ranks are affected: no clock measures the delay
            delay_ms = None
        result.append(Truth(fault["name"], fault["cause"], rank, period, delay_ms))
    return result


def _delay_ms(clocks: list[Clock], stopped_ns: list[list[int]], *, is_repaid: bool) -> float | None:
    """The time before the forward pass, or until its end, beyond the same rank's other steps."""
    if stopped_ns:
        return median(end - begin for begin, end in stopped_ns) / 1e6
    end = 3 if is_repaid else 2
    before_ns = np.concatenate([rows[:, end] - rows[:, 1] for rows in clocks])
    disturbed = np.concatenate([rows[:, 5] == 1 for rows in clocks])
    if not disturbed.any():
        return None
    usual_ns = float(np.median(before_ns[~disturbed])) if (~disturbed).any() else 0.0
    return (float(np.median(before_ns[disturbed])) - usual_ns) / 1e6


def judged(scenario: str, folder: Path, report: dict[str, Any]) -> Judged:
    """The verdicts of a report against the truth in the job's folder."""
    what = truths(folder)
    result = Judged(scenario, what, said=said(report), n_lost=report["examined"]["n_lost_records"])
    steps = clock(folder, 0)
    result.n_steps = len(steps)
    if len(steps) > 1:
        result.step_ms = round(float(np.median(np.diff(steps[:, 4]))) / 1e6, 3)
    if result.n_lost:
        result.wrong.append(f"{result.n_lost} records lost")
    named = {rank for verdict in report["verdicts"] for rank in verdict["ranks"]}
    culprits = {truth.rank for truth in what if truth.rank is not None}
    if named != culprits:
        result.wrong.append(f"named {sorted(named)}, not {sorted(culprits)}")
    result.wrong += [
        f"also reported {verdict['kind']}"
        for verdict in report["verdicts"]
        if not any(_is_on(truth, verdict) for truth in what) and not verdict["ranks"]
    ]
    for truth in what:
        _judge(truth, report["verdicts"], result)
    return result


def _judge(truth: Truth, verdicts: list[dict[str, Any]], result: Judged) -> None:
    verdict = next((entry for entry in verdicts if _is_on(truth, entry)), None)
    if not verdict:
        result.wrong.append(f"no verdict on {truth.name} in rank {truth.rank}")
        return
    if truth.rank is None:
        return
    cause: dict[str, Any] = verdict["causes"][0] if verdict["causes"] else {"cause": "", "share": 0.0}
    result.share = cause["share"]
    # The stacks of a hang from before the trace show the rank and its line, not the call that it lacks.
    is_cause_known = not verdict.get("evidence", {}).get("captured_late")
    if is_cause_known and cause["cause"] != truth.cause:
        result.wrong.append(f"cause {cause['cause']}, not {truth.cause}")
    elif is_cause_known and cause["share"] < CAUSE_SHARE:
        result.wrong.append(f"{truth.cause} only {cause['share']:.0%}")
    if (verdict["kind"] == "hang") != (truth.name == "hang") or verdict["kind"] not in ("straggler", "hang"):
        result.wrong.append(f"kind {verdict['kind']}")
    if truth.period and verdict["period_steps"] != truth.period:
        result.wrong.append(f"period {verdict['period_steps']}, not {truth.period}")
    if verdict["n_incidents"]:
        total_ms = sum(entry["excess_ms"] for entry in verdict["causes"])
        result.excess_ms = round(total_ms / verdict["n_incidents"], 1)
    if truth.delay_ms and verdict["late_ms"]:
        result.late_ms = verdict["late_ms"]["median"]
        error = verdict["late_ms"]["median"] / truth.delay_ms - 1
        result.delay_error_percent = round(100 * error, 1)
        if abs(error) > TOLERANCE:
            result.wrong.append(
                f"late {verdict['late_ms']['median']:.1f} ms, not {truth.delay_ms:.1f}"
                f" (excess {result.excess_ms} ms each)"
            )


def _is_on(truth: Truth, verdict: dict[str, Any]) -> bool:
    return verdict["kind"] == MOVING if truth.rank is None else truth.rank in verdict["ranks"]


def said(report: dict[str, Any]) -> str:
    """The verdicts in a few words each, or the answer without a verdict."""
    return "; ".join(_words(verdict) for verdict in report["verdicts"]) or str(report["answer"])


def _words(verdict: dict[str, Any]) -> str:
    parts = [verdict["kind"], ",".join(map(str, verdict["ranks"]))]
    if verdict["causes"]:
        parts.append(f"{verdict['causes'][0]['cause']} {verdict['causes'][0]['share']:.0%}")
    if verdict["period_steps"]:
        parts.append(f"/{verdict['period_steps']}")
    if verdict["late_ms"]:
        parts.append(f"{verdict['late_ms']['median']:.1f} ms")
    if verdict["abstained_because"]:
        parts.append(f"({verdict['abstained_because'][:60]})")
    return " ".join(part for part in parts if part)
