"""Logs with the timers of training frameworks: Megatron-LM, DeepSpeed, NVRx."""

from pathlib import Path
from random import Random

from .job import Job
from .shapes import Format

_FACTOR = 1.35  # a slow rank's time in the median rank's


def _times(job: Job, typical_ms: float, chance: Random) -> dict[int, float]:
    return {
        r: typical_ms * (_FACTOR if r in job.culprits else 1.0) * chance.uniform(0.98, 1.02)
        for r in range(job.n_ranks)
    }


def _waits(job: Job, chance: Random) -> dict[int, float]:
    """Times inside communication: the slow rank waits least."""
    return {
        r: (4.0 if r in job.culprits else 45.0 if job.culprits else 4.0) * chance.uniform(0.9, 1.1)
        for r in range(job.n_ranks)
    }


def _megatron(folder: Path, job: Job, chance: Random) -> None:
    """--timing-log-option all: Timers._get_all_ranks_time_string."""
    lines = []
    for step in range(1, 6):
        lines.append(
            f" [2026-11-29 {10 + job.number}:00:{step:02d}] iteration {step:8d}/      50 | consumed samples: "
            f"{step * 256:12d} | elapsed time per iteration (ms): 306.5 |"
        )
        lines.append("times across ranks (ms):")
        for name, values in (
            ("forward-backward", _times(job, 250.0, chance)),
            ("forward-compute", _times(job, 120.0, chance)),
            ("all-grads-sync", _waits(job, chance)),
        ):
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in values.items()]
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def _detector(folder: Path, job: Job, chance: Random) -> None:
    """StragglerDetector.report: the ranks with the lowest and the highest throughput."""
    lines = []
    for step in range(1, 6):
        flops = {rank: 99 * 120 / ms for rank, ms in _times(job, 120.0, chance).items()}
        low, high = min(flops, key=lambda r: flops[r]), max(flops, key=lambda r: flops[r])
        lines.append(
            f"[2026-11-29 {10 + job.number}:00:{step:02d}] iteration {step} | "
            "elapsed time per iteration (ms): 306.5 |"
        )
        lines.append(
            f"0: 2026-11-29 {10 + job.number}:00:{step:02d} | MnRtt/Rnk: 7.41ms/{high} | "
            f"MxRtt/Rnk: 7.51ms/{low} | MnEtpt/Rnk: {flops[low]:.2f}TF/{low} | MxEtpt/Rnk: {flops[high]:.2f}TF/{high}"
        )
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def _deepspeed(folder: Path, job: Job, chance: Random) -> None:
    """wall_clock_breakdown: SynchronizedWallClockTimer.log of every rank."""
    lines = []
    for _ in range(5):
        forward, backward, waits = _times(job, 50.0, chance), _times(job, 90.0, chance), _waits(job, chance)
        lines += [
            f"[2026-11-29 {10 + job.number}:00:00,000] [INFO] [logging.py:128:log_dist] "
            f"[Rank {rank}] time (ms) | fwd_microstep: "
            f"{forward[rank]:.2f} | bwd_microstep: {backward[rank]:.2f} | bwd_inner_microstep: {backward[rank]:.2f} | "
            f"bwd_allreduce_microstep: {waits[rank]:.2f} | step_microstep: 8.00"
            for rank in range(job.n_ranks)
        ]
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def _nvrx(folder: Path, job: Job, chance: Random) -> None:
    """StragglerDetectionCallback: relative performance scores and the worst ranks."""
    lines = []
    for _ in range(3):
        scores = {rank: 120 / ms for rank, ms in _times(job, 120.0, chance).items()}
        lines.append("GPU relative performance:")
        lines += [f"  Rank={rank} Node={job.host(rank)} Score={score:.2f}" for rank, score in scores.items()]
    (folder / "train.log").write_text("\n".join(lines) + "\n")


FORMATS = (
    Format(
        "Megatron-LM timers",
        "NVIDIA/Megatron-LM core_v0.14.0, megatron/core/timers.py",
        _megatron,
        has_groups=False,
    ),
    Format(
        "Megatron-LM straggler detector",
        "NVIDIA/Megatron-LM core_v0.14.0, megatron/core/utils.py",
        _detector,
        has_groups=False,
        names_all=False,
    ),
    Format(
        "DeepSpeed wall clock",
        "deepspeedai/DeepSpeed v0.17.0, deepspeed/utils/timer.py",
        _deepspeed,
        has_groups=False,
    ),
    Format(
        "NVRx straggler report",
        "NVIDIA/nvidia-resiliency-ext v0.4.0, ptl_resiliency/straggler_det_callback.py",
        _nvrx,
        has_groups=False,
    ),
)
