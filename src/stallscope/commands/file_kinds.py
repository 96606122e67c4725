"""The files of other tools: the possible answers of each kind, and the command. Shown by import --help and in docs."""

import textwrap
from typing import NamedTuple


class Kind(NamedTuple):
    """One row: the file in plain words, the answers that it permits, and the command."""

    file: str
    answers: str
    command: str


KINDS = (
    Kind(
        "log of torchrun, Slurm, Ray, mpirun or kubectl; dmesg",
        "the rank that failed first, with its traceback, exit status, Xid or out-of-memory kill; the rank that is "
        "behind when NCCL's watchdog fires, with operation, group and line",
        "stallscope explain slurm-77.out",
    ),
    Kind(
        "stacks of all ranks: py-spy dump (text, --json), faulthandler, gdb 'thread apply all bt', cuda-gdb "
        "'info cuda kernels'",
        "the ranks whose stacks differ from most ranks, with their line",
        "stallscope explain stacks/",
    ),
    Kind(
        "NCCL log (NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL)",
        "the rank that made fewer calls; a rank that uses sockets or lacks GPUDirect; warnings",
        "stallscope explain nccl.*",
    ),
    Kind(
        "flight-recorder dumps of PyTorch 2.1 to 2.11 or torchcomms (pickle, JSON)",
        "the rank that hangs, with operation, group and line; different calls in one round",
        "stallscope explain nccl_trace_rank_*",
    ),
    Kind(
        "two ncclras answers (text or -f json) 10 s or more apart, or the running job",
        "a rank that is behind, dead, or not yet in the communicator",
        "stallscope explain ras*.json; stallscope trace --ras",
    ),
    Kind(
        "torch.profiler traces of all ranks (JSON, .gz, .zip, a folder per rank, fused by TraceLens)",
        "late ranks and their cause, slow GPUs, uneven work",
        "stallscope explain traces/",
    ),
    Kind(
        "Nsight Systems reports",
        "late ranks and their cause",
        "nsys export --type sqlite R.nsys-rep; stallscope explain *.sqlite",
    ),
    Kind(
        "NCCL Inspector log (JSON) or metrics (.prom)",
        "late ranks and their period; metrics: the GPU that enters last, on average",
        "stallscope explain nccl-inspector/",
    ),
    Kind(
        "timers of Megatron-LM (--timing-log-option all), its straggler detector, DeepSpeed, NVRx",
        "the slow rank, and its timer",
        "stallscope explain train.log",
    ),
    Kind(
        "recording folder, pipeline trace, node database of another agent",
        "late ranks and their cause",
        "stallscope explain FOLDER",
    ),
)


def as_help() -> str:
    """The table for a terminal of 80 columns."""
    return "\n".join(_row(kind) for kind in KINDS)


def _row(kind: Kind) -> str:
    parts = ((kind.file, "- ", "  "), (kind.answers, "  answers: ", "    "), (kind.command, "  $ ", "    "))
    return "\n".join(
        textwrap.fill(text, 76, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
        for text, first, rest in parts
    )
