"""Runs the job shapes of the second generator, healthy and with faults, and counts the marks by shape."""

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from answers import Answer, answer
from generator.faults import FAULTS
from generator.jobs import Truth, exists, job
from generator.shapes import SHAPES
from simulated import Spread, spread

from stallscope.diagnose.engine import diagnose

HELD_OUT = 900_000
"""Seeds from here on are held out: no change to the diagnosis was judged by them."""
IN_TURN = 4
"""Each seed runs every fourth fault of a shape, so four seeds run all."""
N_SEEDS = 24


class Case(NamedTuple):
    """One job. fault: "" for a healthy job."""

    shape: str
    fault: str
    seed: int


class Ran(NamedTuple):
    """The result of a case. truth_text: the right answer in words."""

    case: Case
    answer: Answer
    truth_text: str
    took_s: float


def cases(shapes: Iterable[str], seeds: range, *, fault: str = "") -> list[Case]:
    """A healthy job for each shape and seed, and every fourth fault; with `fault`, that fault only, or none."""
    made = []
    for number, shape in enumerate(shapes):
        for seed in seeds:
            names = ["", *list(FAULTS)[(seed + number) % IN_TURN :: IN_TURN]]
            names = [fault.removeprefix("none")] if fault else names
            made += [Case(shape, name, seed) for name in names]
    return made


def ran(case: Case) -> Ran | None:
    """Generate, diagnose and judge a case; None where the shape cannot have the fault."""
    begin = time.monotonic()
    gc.disable()  # a job is 100,000 small objects that live until its end: collections take a quarter of the time
    if not exists(case.shape, case.fault, case.seed):
        gc.enable()
        return None
    trace, truth = job(case.shape, case.fault, case.seed)
    result = Ran(case, answer(diagnose(trace), truth), _text(truth), time.monotonic() - begin)
    gc.enable()
    return result


def _text(truth: Truth) -> str:
    if truth.fault is None:
        return f"healthy, uneven {truth.uneven}" if truth.uneven else "healthy"
    ranks = ",".join(map(str, truth.fault.ranks[:8])) + (",..." if len(truth.fault.ranks) > 8 else "")
    causes = "/".join(truth.fault.causes)
    observed = ", GPU times" if truth.fault.slow_gpus and truth.has_gpu_times else ""
    return f"[{ranks}] {causes}, {100 * truth.cost_share:.0f} % of the time, {truth.cost_gpu_s:.2f} GPU s{observed}"


def run(shapes: Iterable[str], seeds: range, *, fault: str = "", spread: Spread = spread) -> list[Ran]:
    """The cases of some shapes and seeds that `spread` runs."""
    return [done for done in spread(ran, cases(shapes, seeds, fault=fault)) if done is not None]


def summary(done: list[Ran]) -> dict[str, Any]:
    """Counts by shape, the weakest first; and each case that is not right."""
    by_shape: dict[str, list[Ran]] = defaultdict(list)
    by_fault: dict[str, list[Ran]] = defaultdict(list)
    for entry in done:
        by_shape[entry.case.shape].append(entry)
        if entry.case.fault:
            by_fault[entry.case.fault].append(entry)
    rows = {shape: _counts(some) for shape, some in by_shape.items()}
    return {
        "total": _counts(done),
        "by_shape": dict(sorted(rows.items(), key=lambda row: -_weakness(row[1]))),
        "by_fault": {name: _counts(some)["faults"] for name, some in by_fault.items()},
        "misses": [_miss(entry) for entry in done if _is_miss(entry.answer)],
    }


def _counts(done: list[Ran]) -> dict[str, Any]:
    healthy = [entry.answer for entry in done if not entry.case.fault]
    faulty = [entry.answer for entry in done if entry.case.fault]
    marks, others = Counter(entry.mark for entry in healthy), Counter(entry.mark for entry in faulty)
    cause, cost = Counter(entry.cause for entry in faulty), Counter(entry.cost for entry in faulty)
    return {
        "healthy": {
            "n": len(healthy),
            **{name: marks[name] for name in ("right", "accused", "inconclusive", "missed")},
        },
        "faults": {
            "n": len(faulty),
            **{name: others[name] for name in ("right", "inconclusive", "missed")},
            "wrong": others["wrong"] + others["accused"],
            "cause_right": cause["right"],
            "cause_wrong": cause["wrong"],
            "cost_right": cost["right"],
            "cost_wrong": cost["wrong"],
        },
    }


def _weakness(row: dict[str, Any]) -> float:
    """Accusations and wrong ranks weigh most, then missed faults, then costs."""
    healthy, faults = row["healthy"], row["faults"]
    share = healthy["accused"] / max(healthy["n"], 1) + faults["wrong"] / max(faults["n"], 1)
    missed = (faults["missed"] + 0.5 * faults["inconclusive"] + 0.2 * faults["cost_wrong"]) / max(
        faults["n"], 1
    )
    unclear = (healthy["missed"] + healthy["inconclusive"]) / max(healthy["n"], 1)
    return float(10 * share + missed + 0.3 * unclear)


def _is_miss(entry: Answer) -> bool:
    return entry.mark != "right" or "wrong" in (entry.cause, entry.cost)


def _miss(entry: Ran) -> dict[str, Any]:
    what = [entry.answer.mark] if entry.answer.mark != "right" else []
    what += [
        name for name, mark in (("cause", entry.answer.cause), ("cost", entry.answer.cost)) if mark == "wrong"
    ]
    return {
        "shape": entry.case.shape,
        "seed": entry.case.seed,
        "fault": entry.case.fault or "none",
        "what": ", ".join(what),
        "truth": entry.truth_text,
        "report": entry.answer.report,
        "cost_ratio": entry.answer.cost_ratio,
    }


def text(result: dict[str, Any], *, n_misses: int = 400) -> str:
    """The summary for a terminal: shapes, the weakest first, then each miss in one line."""
    lines = [
        f"{'shape':16} {'healthy':>8} {'accused':>8} {'inconcl.':>8} {'other':>6} | {'faults':>6} {'right':>6}"
        f" {'wrong':>6} {'missed':>6} {'inconcl.':>8} | {'cause':>7} {'cost':>7}"
    ]
    for name, row in [("all", result["total"]), *result["by_shape"].items()]:
        h, f = row["healthy"], row["faults"]
        lines.append(
            f"{name:16} {h['n']:8} {h['accused']:8} {h['inconclusive']:8} {h['missed']:6} | {f['n']:6} {f['right']:6}"
            f" {f['wrong']:6} {f['missed']:6} {f['inconclusive']:8} |"
            f" {f['cause_right']:3}/{f['cause_right'] + f['cause_wrong']:<3}"
            f" {f['cost_right']:3}/{f['cost_right'] + f['cost_wrong']:<3}"
        )
    lines.append("")
    for name, f in result["by_fault"].items():
        lines.append(
            f"{name:18} {f['n']:4} right {f['right']:4} wrong {f['wrong']:3} missed {f['missed']:3} inconclusive"
            f" {f['inconclusive']:3} cause wrong {f['cause_wrong']:3} cost wrong {f['cost_wrong']:3}"
        )
    lines.append("")
    order = {"accused": 0, "wrong": 1, "missed": 2, "inconclusive": 3}
    for miss in sorted(result["misses"], key=lambda miss: order.get(miss["what"].split(",")[0], 4))[
        :n_misses
    ]:
        ratio = (
            f" (cost {miss['cost_ratio'][0]} to {miss['cost_ratio'][1]} of the truth)"
            if miss["cost_ratio"]
            else ""
        )
        lines.append(
            f"{miss['what'].upper()}: {miss['shape']} --seeds {miss['seed']} fault {miss['fault']}: "
            f"truth {miss['truth']}; answer: {miss['report'][:160]}{ratio}"
        )
    return "\n".join(lines)


ALL_SHAPES = tuple(SHAPES)
