"""Timers and metrics: a rank that they name is named, a minimum and a maximum name none.

The lines follow megatron/core/timers.py and utils.py (core 0.8), deepspeed/utils/timer.py and the Inspector's README.
"""

from pathlib import Path

import pytest

from stallscope.importers import importer_for
from stallscope.importers.framework_timers import IMPORTER
from stallscope.importers.nccl_metrics import IMPORTER as METRICS

from ..diagnose.reports import report_of

N_RANKS = 8


def megatron(slow: int, factor: float = 1.3) -> str:
    lines = []
    for step in range(3):
        lines.append(f" iteration {step:8d}/      10 | elapsed time per iteration (ms): 306.5 |")
        lines.append("times across ranks (ms):")
        for name, ms in (("forward-compute", 120.0), ("all-grads-sync", 30.0)):
            lines.append(f"  {name}:")
            for rank in range(N_RANKS):
                is_slow = rank == slow
                value = (
                    ms * (factor if is_slow else 1.0)
                    if name == "forward-compute"
                    else ms * (0.2 if is_slow else 1)
                )
                lines.append(f"     rank {rank:2d}: {value:.2f}")
    return "\n".join(lines)


def straggler_detector(slow: int, factor: float = 1.3) -> str:
    return (
        "[2026-01-01 10:00:00] iteration 5 | elapsed time per iteration (ms): 306.5 |\n"
        f" MnRtt/Rnk: 7.41ms/4 | MxRtt/Rnk: 7.51ms/{slow} | MnEtpt/Rnk: {99 / factor:.2f}TF/{slow} | "
        "MxEtpt/Rnk: 99.00TF/1"
    )


def deepspeed(slow: int, factor: float = 1.3) -> str:
    return "\n".join(
        f"[2026-01-01 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank {rank}] time (ms) | fwd_microstep: "
        f"{50 * (factor if rank == slow else 1):.2f} | bwd_microstep: 90.00 | bwd_allreduce_microstep: 9.00"
        for _ in range(3)
        for rank in range(N_RANKS)
    )


def nvrx(slow: int, factor: float = 1.3) -> str:
    rows = [
        f"  Rank={rank} Node=node0 Score={1 / (factor if rank == slow else 1):.2f}" for rank in range(N_RANKS)
    ]
    return "GPU relative performance:\n" + "\n".join(rows)


FORMS = {form.__name__: form for form in (megatron, straggler_detector, deepspeed, nvrx)}


@pytest.mark.parametrize("slow", [0, 5])
@pytest.mark.parametrize("form", FORMS)
def test_the_slow_rank_is_named(tmp_path: Path, form: str, slow: int):
    file = tmp_path / "train.log"
    file.write_text(FORMS[form](slow) + "\n")
    assert importer_for(file) is IMPORTER
    (verdict,) = report_of(IMPORTER.read(file)).verdicts
    assert (verdict.kind, verdict.ranks) == ("straggler", [slow])


@pytest.mark.parametrize("form", FORMS)
def test_equal_ranks_name_none(tmp_path: Path, form: str):
    file = tmp_path / "train.log"
    file.write_text(FORMS[form](0, 1.0) + "\n")
    trace = IMPORTER.read(file)
    assert not [verdict for verdict in report_of(trace).verdicts if verdict.ranks]
    assert trace.coverage.gaps


def test_a_minimum_and_a_maximum_name_no_rank(tmp_path: Path):
    file = tmp_path / "train.log"
    rows = "    forward-backward ...............................: (250.11, 290.02)\n"
    file.write_text(
        f" iteration 6 | elapsed time per iteration (ms): 306.5 |\n (min, max) time across ranks (ms):\n{rows}"
    )
    report = report_of(IMPORTER.read(file))
    assert not [verdict for verdict in report.verdicts if verdict.ranks]
    assert any("290.0 ms on the slowest" in str(remark["what"]) for remark in report.benign)


@pytest.mark.parametrize("labels", ['rank="{}"', 'node="n0",gpu="GPU{}"'])
def test_metrics_state_the_gpu_that_enters_last(tmp_path: Path, labels: str):
    file = tmp_path / "nccl.prom"
    file.write_text(
        "".join(
            f'nccl_collective_exec_time_microseconds{{{labels.format(i)},comm_name="dp",collective="AllReduce"}} '
            f"{300 if i == 4 else 9000}\n"
            for i in range(8)
        )
    )
    assert importer_for(file) is METRICS
    (verdict,) = report_of(METRICS.read(file)).verdicts
    assert "enters last" in verdict.summary
    assert verdict.ranks == ([4] if "rank" in labels else [])
