"""The output of the proof: JSON, a short table, and archives of bounded size."""

import json
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import report
from judging import Judged, Truth

MAX_BYTES = 14 << 20  # of one archive
FULL_BYTES = 9 << 20  # from here on a new one is begun
N_ARCHIVES = 2  # of each kind
MAX_FILE_BYTES = 8 << 20  # of one before it is packed; the clock of a long job is more


def write(path: Path, what: object) -> None:
    """As JSON, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what, indent=1, default=str) + "\n")
    part.replace(path)


@cache
def machine(*, is_emulated: bool) -> dict[str, Any]:
    """Processor, GPUs and versions."""
    facts = report.machine() | {"commit": report.commit(), "date": time.strftime("%F")}
    if is_emulated:
        return facts | {"gpus": "emulated"}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")
    versions = "import torch; print(torch.__version__, '.'.join(map(str, torch.cuda.nccl.version())))"
    said = subprocess.run([sys.executable, "-c", versions], capture_output=True, text=True).stdout.split()
    return facts | {
        "gpus": [gpu for gpu in gpus if gpu],
        "torch_nccl": said,
        "python": platform.python_version(),
    }


def table(
    judged: Iterable[Judged],
    slowdowns: Iterable[dict[str, Any]],
    failures: dict[str, str],
    skipped: Sequence[str],
) -> str:
    """A line for each part."""
    lines = [_line(one) for one in judged]
    lines += [
        f"slowdown {one['workload']}: {one['slowdown_percent']} +- {one['spread_percent']} %, "
        f"at most {one['upper_bound_percent']} %; {one['runs']} runs, {one['steps_per_s']} steps/s, "
        f"{one['hits_per_step']} hits/step, {one['slowdown_us_per_step']} us/step; agent started and stopped: "
        f"{one.get('restarted_slowdown_percent', 'not measured')} +- {one.get('restarted_spread_percent', '')}"
        for one in slowdowns
    ]
    lines += [f"FAILED {name}: {' '.join(words.split())[-300:]}" for name, words in failures.items()]
    if skipped:
        lines.append(f"skipped, no time: {', '.join(skipped)}")
    return "\n".join(lines)


def _line(one: Judged) -> str:
    verdict = "right" if not one.wrong else f"WRONG ({'; '.join(one.wrong)})"
    truth = ", ".join(map(_truth, one.truths)) or "healthy"
    return f"{one.scenario:18} {verdict}; report: {one.said}; truth: {truth}; step {one.step_ms} ms, {one.n_lost} lost"


def _truth(one: Truth) -> str:
    delay = f" {one.delay_ms:.1f} ms" if one.delay_ms is not None else ""
    period = f" /{one.period}" if one.period else ""
    return f"{one.name} in {'moving ranks' if one.rank is None else one.rank}{period}{delay}"


def pack(work: Path, disk: Path, *, right: set[str], out: Path) -> None:
    """Archives of each scenario's trace, clocks and logs; what does not fit is left out."""
    names = sorted(folder.name for folder in work.iterdir() if folder.is_dir())
    _pack([name for name in names if name not in right], work, disk, stem=out / "failures")
    _pack([name for name in names if name in right], work, disk, stem=out / "traces")


def _pack(names: Sequence[str], work: Path, disk: Path, *, stem: Path) -> None:
    left = list(names)
    for number in range(1, N_ARCHIVES + 1):
        if not left:
            return
        path = stem.with_name(f"{stem.name}-{number}.tar.gz")
        with path.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=4) as archive:
            while left and file.tell() < FULL_BYTES:
                _add(archive, left.pop(0), work, disk)
        if path.stat().st_size > MAX_BYTES:
            path.unlink()


def _add(archive: tarfile.TarFile, name: str, work: Path, disk: Path) -> None:
    suffixes = {".csv", ".npz", ".json", ".log", ".err"}
    if any((work / name).glob("*.npz")):
        suffixes.remove(".csv")  # the same steps in more bytes
    kept = [path for path in (work / name).iterdir() if path.suffix in suffixes]
    for path in [*kept, *disk.glob(f"{name}.*")]:
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            archive.add(path, f"{name}/{path.name}")
