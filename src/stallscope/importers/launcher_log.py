"""Logs of launchers: torchrun, Slurm, Ray, mpirun, kubectl; one file or one per rank, ranks interleaved.

Read: time-outs of NCCL's watchdog and the progress that it states (watchdog_lines), Python tracebacks, exit codes and
signals in the summaries of launchers, the out-of-memory killer, Xid errors (process_ends). Of a restarted job, and of
several jobs in one log, the last attempt counts.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from stallscope.events.trace import Gap
from stallscope.importers.log_reader import parts_of
from stallscope.importers.rank_statements import Statements, attempts
from stallscope.importers.registry import Importer
from stallscope.importers.texts import HEAD_BYTES, tail_of

_WORDS = (
    *(
        b"WorkNCCL(",
        b"ProcessGroupNCCL",
        b"Watchdog caught",
        b"Traceback (most recent call last)",
        b"ChildFailedError",
    ),
    *(
        b"torch.distributed",
        b"torchrun",
        b"srun: ",
        b"slurmstepd: ",
        b"exitcode",
        b"NVRM: Xid",
        b"oom-kill",
        b"[rank",
    ),
    *(b"Killed process", b"raylet", b"MASTER_ADDR", b"world_size", b"WORLD_SIZE", b"mpirun", b"nccl_version"),
    *(b"BAD TERMINATION", b"[launch.py:", b"torch.multiprocessing", b"VllmWorker", b"EngineCore", b"sglang"),
)
_LOG_NAME = re.compile(r"\.(?:log|out|err|txt)$|stderr|stdout|slurm-")
_SEVERAL = Gap(
    "the logs come from several jobs or attempts and do not state the times",
    "Give the logs of one attempt.",
)


def _accepts(file: Path, head: bytes) -> bool:
    if b"\0" in head[:4096]:
        return False
    return any(word in head for word in _WORDS) or _has_words_later(file, head)


def _has_words_later(file: Path, head: bytes) -> bool:
    """Whether the end of a long log has words of a failure; only for a file with the name of a log."""
    is_long = len(head) >= HEAD_BYTES and _LOG_NAME.search(file.name) is not None
    return is_long and any(word in tail_of(file, HEAD_BYTES) for word in _WORDS)


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the statements of some logs."""
    logs = {file: _last_attempt(file) for file in files}
    statements.merge(_of_one_job(logs))
    statements.sources.append(f"{len(logs)} log{'s' * (len(logs) > 1)} of a launcher")
    if not (statements.failures or statements.progress or statements.stacks or statements.gaps):
        statements.gaps.append(
            Gap(
                "the logs state neither a time-out nor the end of a process",
                "Also give the dumps of the flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE) or the stacks of all ranks.",
            )
        )


def _last_attempt(file: Path) -> Statements:
    """The statements of a log on its last attempt."""
    *earlier, last = attempts(parts_of(file))
    merged = _merged(last)
    for part in (part for attempt in earlier for part in attempt):
        merged.omit("lines of an earlier attempt", len(part.failures) + len(part.progress))
    return merged


def _of_one_job(logs: dict[Path, Statements]) -> Statements:
    """The statements of the newest job; none on failures and time-outs if the order of several jobs is not known."""
    spans = {file: span for file, log in logs.items() if (span := log.span_ns())}
    in_order = sorted(spans, key=lambda file: spans[file])
    *earlier, _newest = attempts([logs[file] for file in in_order]) or [[]]
    n_earlier = sum(map(len, earlier))
    dropped, kept = in_order[:n_earlier], in_order[n_earlier:]
    kept += [file for file in logs if file not in spans and _is_near(file, kept, dropped)]
    newest = [logs[file] for file in kept]
    is_ordered = not dropped or max(spans[f][1] for f in dropped) < min(
        spans[f][0] for f in kept if f in spans
    )
    if not is_ordered or len(attempts(newest)) > 1:
        ranks = set().union(*(log.writers for log in logs.values()))
        return Statements(max(log.world_size for log in logs.values()), writers=ranks, gaps=[_SEVERAL])
    merged = _merged(newest)
    if len(logs) > len(kept):
        merged.omit("logs of an earlier attempt", len(logs) - len(kept))
    return merged


def _is_near(file: Path, kept: list[Path], dropped: list[Path]) -> bool:
    """Whether a log without times is in a folder of the newest attempt's logs."""

    def depth(others: list[Path]) -> int:
        return max(
            (len(Path(os.path.commonpath([file.absolute(), other.absolute()])).parts) for other in others),
            default=0,
        )

    return depth(kept) >= depth(dropped)


def _merged(parts: Iterable[Statements]) -> Statements:
    merged = Statements()
    for part in parts:
        merged.merge(part)
    return merged


IMPORTER = Importer(
    "log of a launcher (torchrun, Slurm, Ray, mpirun, kubectl, dmesg)",
    _accepts,
    collect=collect,
    is_general=True,
)
