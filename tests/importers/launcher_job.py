"""Logs of a job that hung or failed, in the words of its launcher and of PyTorch, with a known truth.

The lines follow ProcessGroupNCCL.cpp (PyTorch 2.4 to 2.9), torch/distributed/elastic/multiprocessing/errors/__init__.py
(2.4), srun and slurmstepd 23.11, the kernel's mm/oom_kill.c (6.8) and the NVIDIA driver's NVRM lines.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

TIMEOUT_MS = 600_000


@dataclass
class Log:
    """Lines by rank; rank -1 is the launcher. hour: of the first line; first_pid: the process of rank 0."""

    n_ranks: int = 8
    hour: int = 10
    first_pid: int = 4000
    lines: list[tuple[int, str]] = field(default_factory=list)
    clock: float = 0.0

    def say(self, rank: int, text: str) -> None:
        self.clock += 0.01
        self.lines += [(rank, line) for line in text.split("\n")]

    def stamp(self) -> str:
        whole = int(self.clock)
        return f"{self.hour}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(self.clock % 1 * 1e9):09d}"


def chatter(log: Log) -> None:
    log.say(-1, f"W1129 {log.hour}:00:00.000000 1 torch/distributed/run.py:793] Setting OMP_NUM_THREADS to 1")
    log.say(0, f"initialising with world_size={log.n_ranks}")
    for step in range(3):
        log.say(0, f"step {step} loss 1.25")


def timeout(
    log: Log,
    rank: int,
    *,
    seq: int,
    enqueued: int,
    op: str = "ALLREDUCE",
    n: int = 1024,
    group: str = "0(default_pg)",
    own: int | None = None,
) -> None:
    """A watchdog's lines. own: the rank in the group."""
    own = rank if own is None else own
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)={TIMEOUT_MS})"
    log.say(
        rank,
        f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:632] [Rank {own}] Watchdog caught collective operation timeout: "
        f"{work} ran for {TIMEOUT_MS + 67} milliseconds before timing out.",
    )
    log.say(
        rank,
        f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID {group} Rank {own}]  failure detected by "
        f"watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, last completed work: "
        f"{seq - 1}",
    )
    log.say(
        rank,
        f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:670] Stack trace of the failed collective: \n"
        "#0 all_reduce from /opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:2806\n"
        "#1 wrapper from /opt/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:81\n"
        "#2 step from /opt/job/train.py:88",
    )


def status(log: Log, rank: int, *, enqueued: int, completed: int) -> None:
    """The heartbeat monitor's line of a rank that did not time out itself."""
    log.say(
        rank,
        f"[E1129 {log.stamp()} ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump "
        "signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last "
        f"enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused by "
        "incorrect usages",
    )


def traceback(log: Log, rank: int, error: str, line: int = 41) -> None:
    log.say(
        rank,
        "Traceback (most recent call last):\n"
        '  File "/opt/job/train.py", line 120, in <module>\n'
        "    main()\n"
        f'  File "/opt/job/data.py", line {line}, in load\n'
        "    batch = next(it)\n"
        "            ^^^^^^^^\n"
        f"{error}",
    )


def summary(log: Log, codes: dict[int, int], first: int) -> None:
    """torchrun's list of failures: codes by rank, the first observed failure last."""

    def entry(number: int, rank: int) -> str:
        code = codes[rank]
        name = {-9: "SIGKILL", -6: "SIGABRT"}.get(code, "SIGTERM")
        how = f"Signal {-code} ({name}) received by PID {log.first_pid + rank}"
        return (
            f"[{number}]:\n  time      : 2026-11-29_{log.hour}:10:{number:02d}\n  host      : node{rank // 4}\n"
            f"  rank      : {rank} (local_rank: {rank % 4})\n  exitcode  : {code} (pid: {log.first_pid + rank})\n"
            f"  error_file: <N/A>\n  traceback : {how if code < 0 else 'To enable traceback see: https://pytorch.org'}"
        )

    others = [rank for rank in codes if rank != first]
    bar = "-" * 60
    log.say(
        -1,
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60
        + "\ntrain.py FAILED\n"
        + bar
        + "\nFailures:\n"
        + ("\n".join(entry(n, rank) for n, rank in enumerate(others, 1)) or "  <NO_OTHER_FAILURES>")
        + f"\n{bar}\nRoot Cause (first observed failure):\n{entry(0, first)}\n"
        + "=" * 60,
    )


def hang(log: Log, culprit: int) -> None:
    """All ranks except one wait in round 60; that rank has entered 59 rounds."""
    chatter(log)
    for rank in range(log.n_ranks):
        if rank != culprit:
            timeout(log, rank, seq=60, enqueued=61)
    status(log, culprit, enqueued=59, completed=59)


def silent_hang(log: Log, culprit: int) -> None:
    """As hang, but the culprit writes nothing any more."""
    chatter(log)
    log.say(culprit, "loading shard 17")
    for rank in range(log.n_ranks):
        if rank != culprit:
            timeout(log, rank, seq=60, enqueued=60)


def other_operation(log: Log, culprit: int) -> None:
    chatter(log)
    for rank in range(log.n_ranks):
        op = "BROADCAST" if rank == culprit else "ALLREDUCE"
        timeout(log, rank, seq=60, enqueued=60, op=op)


def exception(log: Log, culprit: int) -> None:
    """One rank raises; the others lose their connections, and the launcher ends them."""
    chatter(log)
    traceback(log, culprit, "RuntimeError: DataLoader worker (pid 77) exited unexpectedly")
    for rank in range(log.n_ranks):
        if rank != culprit:
            traceback(
                log,
                rank,
                "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
            )
            log.say(
                rank,
                f"[W1129 {log.stamp()} TCPStore.cpp:125] [c10d] recvValue failed: Connection reset by peer",
            )
    codes = {rank: 1 if rank == culprit else -15 for rank in range(log.n_ranks)}
    summary(log, codes, culprit)


def killed(log: Log, culprit: int) -> None:
    """The out-of-memory killer ends one rank; the others are ended by the launcher."""
    chatter(log)
    log.say(
        -1,
        f"[ 9000.5] Out of memory: Killed process {log.first_pid + culprit} (python) total-vm:1kB, anon-rss:1kB",
    )
    summary(log, {rank: -9 if rank == culprit else -15 for rank in range(log.n_ranks)}, culprit)


def killed_then_timeout(log: Log, culprit: int) -> None:
    """One rank dies first; the others time out in the round that it lacks, and abort."""
    chatter(log)
    traceback(
        log,
        culprit,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB",
    )
    log.clock += 600
    for rank in range(log.n_ranks):
        if rank != culprit:
            timeout(log, rank, seq=60, enqueued=60)
    summary(log, {rank: 1 if rank == culprit else -6 for rank in range(log.n_ranks)}, culprit)


def slurm(log: Log, culprit: int) -> None:
    chatter(log)
    log.say(-1, f"srun: error: node{culprit // 4}: task {culprit}: Segmentation fault")
    log.say(-1, "srun: Terminating StepId=77.0")
    log.say(-1, "slurmstepd: error: *** STEP 77.0 ON node0 CANCELLED AT 2026-11-29T10:00:00 ***")
    rest = ",".join(str(rank) for rank in range(log.n_ranks) if rank != culprit)
    log.say(-1, f"srun: error: node0: tasks {rest}: Terminated")


def monitored_barrier(log: Log, culprit: int) -> None:
    chatter(log)
    traceback(log, 0, f"RuntimeError: Rank {culprit} failed to pass monitoredBarrier in 1800000 ms")


def restarted(log: Log, culprit: int) -> None:
    """An earlier attempt failed on another rank; the last one counts."""
    exception(log, (culprit + 3) % log.n_ranks)
    log.say(-1, "[2026-11-29 10:20:00,000] worker group FAILED. 2/3 attempts left; will restart worker group")
    exception(log, culprit)


def gpu_fault(log: Log, culprit: int) -> None:
    chatter(log)
    log.say(
        -1,
        f"[ 100.0] NVRM: Xid (PCI:0000:1b:00): 79, pid={log.first_pid + culprit}, name=python, "
        "GPU has fallen off the bus.",
    )
    traceback(log, culprit, "torch.AcceleratorError: CUDA error: unspecified launch failure")
    summary(log, {rank: 1 if rank == culprit else -15 for rank in range(log.n_ranks)}, culprit)


SHAPES: dict[str, Callable[[Log, int], None]] = {
    shape.__name__: shape
    for shape in (
        hang,
        silent_hang,
        other_operation,
        exception,
        killed,
        killed_then_timeout,
        slurm,
        monitored_barrier,
        restarted,
        gpu_fault,
    )
}


def torchrun(rank: int, line: str) -> str:
    return line if rank < 0 else f"[rank{rank}]:{line}" if line.startswith("[") else f"[rank{rank}]: {line}"


def ray(rank: int, line: str) -> str:
    return (
        line
        if rank < 0
        else f"\x1b[36m(WorkerDict pid={4000 + rank}, ip=10.0.0.{rank // 4})\x1b[0m [rank{rank}]:{line}"
    )


def kubectl(rank: int, line: str) -> str:
    return f"[pod/train-0/main] 2026-11-29T10:00:00.000000Z {torchrun(rank, line)}"


def mpirun(rank: int, line: str) -> str:
    return line if rank < 0 else f"[1,{rank}]<stderr>: {line}"


def srun(rank: int, line: str) -> str:
    return line if rank < 0 else f"{rank}: {line}"


PREFIXES = {entry.__name__: entry for entry in (torchrun, ray, kubectl, mpirun)}


def interleaved(log: Log, prefix: Callable[[int, str], str], seed: int) -> str:
    """One text: the lines of each rank in order, mixed with the lines of ranks that write at the same time."""
    chance = random.Random(seed)
    left, out = list(log.lines), []
    while left:
        i = 0
        while i + 1 < len(left) and chance.random() < 0.3 and left[i][0] >= 0 and left[i + 1][0] >= 0:
            i += 1
        ahead = {rank for rank, _ in left[:i]}
        i = i if left[i][0] not in ahead else 0
        out.append(prefix(*left.pop(i)))
    return "\n".join(out) + "\n"
