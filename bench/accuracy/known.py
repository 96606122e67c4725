"""Recordings and public data sets, whose right answers are known from their makers."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marking import judged

from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.report.verdict import Report
from stallscope.errors import StallscopeError
from stallscope.importers import importer_for
from stallscope.synth.fault_models import Answer

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("STALLSCOPE_DATA") or ROOT.parent / "shared")
ON_DEVICE = ("gpu_shared", "gpu_slow")
WITHOUT_SYSTEM_CALLS = {"host_sleep": "blocked"}
"""Recordings without system calls cannot distinguish a sleep from another block: both names are right."""


def report_on(path: Path) -> Report:
    """Import the files of a path and diagnose them."""
    return diagnose(importer_for(path).read(path))


def recordings() -> list[dict[str, Any]]:
    """Truth, report and mark of every recording."""
    result = []
    for path in sorted(DATA.glob("recordings/*/truth.json")):
        truth = json.loads(path.read_text())
        report, answers = report_on(path.parent), _answers(truth)
        entry = judged(report, answers)
        name = report.verdicts[0].causes[0].cause.name if entry.cause == "wrong" else ""
        cause = "right" if name == WITHOUT_SYSTEM_CALLS.get(truth["cause"], "-") else entry.cause
        result.append(
            {
                "name": path.parent.name,
                "truth": _truth(truth),
                "said": entry.said,
                "culprit": entry.culprit,
                "cause": cause,
                "cost_gpu_seconds": entry.cost_gpu_seconds,
            }
        )
    return result


def _answers(truth: dict[str, Any]) -> tuple[Answer, ...]:
    if truth.get("kind") == "imbalance":
        return (Answer("slow_stage", tuple(truth["slow_stage"]), "imbalance"),)
    if not truth["culprit_ranks"]:
        return ()
    kind = "device" if truth["cause"] in ON_DEVICE else "straggler"
    return (Answer(kind, tuple(truth["culprit_ranks"]), truth["cause"]),)


def _truth(truth: dict[str, Any]) -> str:
    if truth.get("kind") == "imbalance":
        return f"slow stage {truth['slow_stage']}, no bad machine"
    return f"{truth['culprit_ranks']} {truth['cause']}" if truth["culprit_ranks"] else "healthy"


def public() -> list[dict[str, Any]]:
    """Every public data set that is there."""
    result = []
    for name, (truth, is_right) in PUBLIC.items():
        path = DATA / "public" / name
        if not path.exists():
            continue
        try:
            report = report_on(path)
        except StallscopeError as refused:
            result.append({"name": name, "truth": truth, "said": str(refused), "mark": "abstained"})
            continue
        entry = judged(report, ())
        mark = "right" if is_right(report) else "wrong" if entry.n_accused else "abstained"
        result.append({"name": name, "truth": truth, "said": entry.said, "mark": mark})
    return result


def _names(*ranks: int) -> Callable[[Report], bool]:
    def is_right(report: Report) -> bool:
        return {rank for verdict in report.verdicts for rank in verdict.ranks} == set(ranks)

    return is_right


def _is_one_worker(report: Report) -> bool:
    """The file has one tensor-parallel rank of four: dp rank 0 of stage 0 is rank 0 there."""
    return [(verdict.kind, verdict.ranks) for verdict in report.verdicts] == [("straggler", [0])]


def _is_slow_stage(report: Report) -> bool:
    kinds = [(verdict.kind, verdict.ranks) for verdict in report.verdicts]
    return kinds == [("imbalance", [])]


def _is_input(report: Report) -> bool:
    causes = {part.cause.name for verdict in report.verdicts for part in verdict.causes}
    return "input_starvation" in causes and "launch_bound" not in causes


PUBLIC: dict[str, tuple[str, Callable[[Report], bool]]] = {
    "pipeline-traces/trace-AR.parquet": ("one slow worker: stage 0, dp rank 0", _is_one_worker),
    "pipeline-traces/trace-ST.parquet": ("slow last stage, no bad machine", _is_slow_stage),
    "flight-recorder/gpu_error_1st": ("ranks 12 and 14", _names(12, 14)),
    "flight-recorder/lock_gil_1st": ("ranks 9 and 14", _names(9, 14)),
    "node-databases/sample-gpu-node-02.db": (
        "no steps: inconclusive",
        lambda report: report.answer == "inconclusive",
    ),
    "node-databases/sample-cluster.db": ("no rank can be named", _names()),
    "node-databases/pytorch-dataloader-starvation.db": ("input starvation", _is_input),
}
"""By path below public/: the right answer, and whether a report gives it. Facts: README.md there."""


def slowdowns() -> list[dict[str, Any]]:
    """Reported slowdown of the pipeline traces, and the slowdown against a simulated ideal run by their authors."""
    result = []
    for name in ("AR", "ST"):
        path = DATA / "public" / "pipeline-traces" / f"trace-{name}.parquet"
        makers = path.with_name(f"result-{name}.json")
        if not path.exists() or not makers.exists():
            continue
        message = [verdict.evidence.slowdown for verdict in report_on(path).verdicts]
        true = round(json.loads(makers.read_text())["blocking_slowdown"], 3)
        result.append({"name": name, "makers": true, "said": message[0] if message else None})
    return result
