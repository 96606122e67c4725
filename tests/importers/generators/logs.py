"""Logs: launchers with NCCL's watchdog, and NCCL_DEBUG logs."""

from pathlib import Path
from random import Random

from ..launcher_job import (
    PREFIXES,
    Log,
    chatter,
    exception,
    gpu_fault,
    interleaved,
    killed,
    killed_then_timeout,
    slurm,
    srun,
    summary,
    traceback,
)
from .job import WORLD, Job
from .ras import NAMES
from .shapes import Format

_C10D = {
    "all_reduce": "ALLREDUCE",
    "all_gather": "_ALLGATHER_BASE",
    "reduce_scatter": "_REDUCE_SCATTER_BASE",
    "broadcast": "BROADCAST",
}


def _group_words(job: Job, rank: int, name: str) -> str:
    """logPrefix of ProcessGroupNCCL.cpp: local number, GUID with description, rank in the group."""
    number = list(reversed(job.own_groups(rank))).index(name)
    index = job.groups[name].index(rank)
    guid, words = ("0", "default_pg") if name == WORLD else (str(list(job.groups).index(name)), "undefined")
    return f"[PG ID {number} PG GUID {guid}({words}) Rank {index}]"


def _hang(log: Log, job: Job) -> None:
    """checkTimeout, the watchdog and the heartbeat monitor of each rank."""
    chatter(log)
    log.clock += 600
    for rank in range(job.n_ranks):
        group = job.waits_in(rank)
        if group is None:
            continue
        progress = job.progress(rank)[group]
        n, seq = job.n_elements, progress.entered
        words = _group_words(job, rank, group)
        log.say(
            rank,
            f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:683] [Rank {job.groups[group].index(rank)}] Watchdog caught "
            f"collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={_C10D[job.op_of(group)]}, NumelIn={n}, "
            f"NumelOut={n}, Timeout(ms)=600000) ran for 600028 milliseconds before timing out.",
        )
        log.say(
            rank,
            f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:2241] {words}  failure detected by watchdog at work sequence "
            f"id: {seq} PG status: last enqueued work: {progress.entered}, last completed work: {progress.completed}",
        )
        log.say(
            rank,
            f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:730] Stack trace of the failed collective: \n"
            "#0 all_reduce from /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2806\n"
            "#1 step from /opt/job/train.py:88",
        )
    for rank in job.culprits:
        progress = job.progress(rank)[WORLD]
        log.say(
            rank,
            f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:1685] {_group_words(job, rank, WORLD)} Received a dump signal "
            "due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued "
            f"NCCL work: {progress.entered}, last completed NCCL work: {progress.completed}.This is most likely caused "
            "by incorrect usages of collectives, e.g., wrong sizes used across ranks",
        )


def _log(job: Job, chance: Random) -> Log:
    log = Log(n_ranks=job.n_ranks, hour=10 + job.number, first_pid=job.pid(0))
    if not job.culprits:
        chatter(log)
    elif job.n_groups or len(job.culprits) > 1 or chance.random() < 0.5:
        _hang(log, job)
    else:
        end = chance.choice((exception, killed, killed_then_timeout, slurm, gpu_fault))
        end(log, job.culprits[0])
    return log


def _launcher(folder: Path, job: Job, chance: Random) -> None:
    """One log of all ranks, under a random prefix."""
    log = _log(job, chance)
    prefix = PREFIXES[chance.choice(list(PREFIXES))]
    (folder / "slurm-77.out").write_text(interleaved(log, prefix, chance.randrange(100)))


def _per_rank(folder: Path, job: Job, chance: Random) -> None:
    """torchrun --log-dir: a folder per rank; the launcher's own output in a file of its own."""
    log = _log(job, chance)
    for rank in range(job.n_ranks):
        (folder / str(rank)).mkdir()
        own = [line for writer, line in log.lines if writer == rank]
        (folder / str(rank) / "stderr.log").write_text(
            "".join(f"[rank{rank}]:{line}\n" for line in own) or "started\n"
        )
    own = [line for writer, line in log.lines if writer < 0]
    (folder / "launcher.log").write_text("".join(f"{line}\n" for line in own))


def _nccl(folder: Path, job: Job, chance: Random) -> None:
    """NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,COLL with NCCL_DEBUG_FILE=nccl.%h.%p."""
    types = {"all_reduce": 9, "all_gather": 7, "reduce_scatter": 7, "broadcast": 1}
    for rank in range(job.n_ranks):
        host, pid = job.host(rank), job.pid(rank)
        device = rank % max(job.n_ranks // 2, 1)
        head = f"{host}:{pid}:{pid} [{device}] NCCL INFO "
        addresses = {
            name: f"0x{0x55000000 + 0x1000 * i + 0x10 * rank:x}" for i, name in enumerate(job.groups)
        }
        lines = [f"{head}NCCL version 2.27.3+cuda12.8", f"{head}Using network IB"]
        for name in reversed(job.own_groups(rank)):
            members = job.groups[name]
            words = (
                f"comm {addresses[name]} rank {members.index(rank)} nranks {len(members)} "
                f"cudaDev {device} nvmlDev {device} busId {device + 1}b000 commId 0x{job.comm_id(name):x}"
            )
            lines += [
                f"{head}ncclCommInitRankConfig {words} - Init START",
                f"{head}ncclCommInitRankConfig {words} - Init COMPLETE",
            ]
        progress = job.progress(rank)
        made = dict.fromkeys(progress, 0)
        for n in range(1, job.last_step + 2):
            for name in job.own_groups(rank):
                if n > progress[name].entered:
                    continue
                op = job.op_of(name)
                lines.append(
                    f"{head}{NAMES[op]}: opCount {made[name]:x} sendbuff 0x7f0000000000 recvbuff 0x7f0000001000 count "
                    f"{job.n_elements} datatype {types[op]} op 0 root 0 comm {addresses[name]} "
                    f"[nranks={len(job.groups[name])}] stream 0x5600"
                )
                made[name] += 1
        (folder / f"nccl.{host}.{pid}.log").write_text("\n".join(lines) + "\n")


FORMATS = (
    Format(
        "launcher log, one file",
        "pytorch/pytorch v2.11.0, c10d/ProcessGroupNCCL.cpp, elastic/multiprocessing/errors; srun 23.11; Linux 6.8",
        _launcher,
    ),
    Format(
        "launcher logs, one per rank",
        "pytorch/pytorch v2.11.0, elastic/multiprocessing/api.py (--log-dir)",
        _per_rank,
        can_append=False,
    ),
    Format("NCCL_DEBUG logs", "NVIDIA/nccl 5067397c, src/init.cc, src/enqueue.cc", _nccl),
)
__all__ = ["FORMATS", "srun", "summary", "traceback"]
