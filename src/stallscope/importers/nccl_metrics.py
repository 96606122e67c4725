"""Metrics of NCCL's Inspector plugin (.prom) and traces of NCCL's example profiler plugin, as statements on ranks.

Metrics hold the time inside collectives per GPU, as an average over an interval: in a synchronising collective the GPU
that enters last is inside for the shortest time. Traces of the example plugin (plugins/profiler/example) hold when a
process enqueued its collectives. The formats follow NVIDIA/nccl, commit 5067397c.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Gap
from stallscope.importers.rank_statements import Failure, Statements
from stallscope.importers.registry import Importer
from stallscope.importers.texts import head_of, lines_of

_METRIC = re.compile(
    r"^nccl_collective_exec_time_microseconds\{(?P<labels>[^}]*)\} "
    r"(?P<value>\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,2})?)(?: |$)"
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PLUGIN_RANK = re.compile(rb'"Rank": ?(\d{1,7})')
_SHORT = 0.5  # of the median time inside


def _accepts(file: Path, head: bytes) -> bool:
    is_metrics = b"nccl_collective_exec_time_microseconds{" in head or b"nccl_bus_bandwidth_gbs{" in head
    return is_metrics or (b'"CommHash"' in head and b'"SeqNum"' in head and b'"ph"' in head)


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the statements of some files."""
    inside: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for file in files:
        head = head_of(file)
        if b'"CommHash"' in head:
            statements.writers |= {int(rank) for rank in _PLUGIN_RANK.findall(head)}
            statements.gaps.append(
                Gap(
                    "traces of NCCL's example profiler plugin show when collectives were enqueued, "
                    "not which rank waited",
                    "Load the Inspector plugin (libnccl-profiler-inspector.so), or profile with torch.profiler.",
                )
            )
            continue
        for line in lines_of(file):
            if match := _METRIC.match(line):
                _add(inside, dict(_LABEL.findall(match["labels"])), float(match["value"]))
    jobs = sorted({group[0] for group in inside})
    if len(jobs) > 1:
        statements.gaps.append(
            Gap(
                f"the metrics come from several jobs ({', '.join(jobs[:4])})",
                "Give the files of one job: remove older files.",
            )
        )
        inside = {}
    for group, by_gpu in inside.items():
        _compare(group, by_gpu, statements)
    if inside:
        statements.gaps.append(
            Gap(
                "metrics are averages per GPU, which show no single round",
                "Write the Inspector's JSON log instead (unset NCCL_INSPECTOR_PROM_DUMP).",
            )
        )
    statements.sources.append("metrics of NCCL plugins")


def _add(inside: dict[tuple[str, ...], dict[str, list[float]]], labels: dict[str, str], value: float) -> None:
    group = tuple(
        labels.get(name, "") for name in ("slurm_job_id", "comm_name", "nranks", "collective", "message_size")
    )
    owner = (
        f"rank {labels['rank']}"
        if "rank" in labels
        else f"{labels.get('gpu', 'a GPU')} on {labels.get('node', '?')}"
    )
    inside.setdefault(group, {}).setdefault(owner, []).append(value)


def _compare(group: tuple[str, ...], by_gpu: dict[str, list[float]], statements: Statements) -> None:
    """Report a GPU that is inside for much less time than the others: it enters last."""
    if len(by_gpu) < 3:
        return
    value = {owner: float(np.median(own)) for owner, own in by_gpu.items()}
    typical = float(np.median(list(value.values())))
    short = [owner for owner, each in value.items() if each < _SHORT * typical]
    if 3 * len(short) > len(value):
        return
    for owner in short:
        words = (
            f"{owner} is {value[owner]:.0f} us inside {group[3]}, the median {typical:.0f} us: it enters last"
        )
        rank = int(owner[5:]) if owner.startswith("rank ") else UNKNOWN
        statements.failures.append(Failure(rank, "slow", words, 0))


IMPORTER = Importer("metrics of NCCL's Inspector (.prom)", _accepts, collect=collect)
