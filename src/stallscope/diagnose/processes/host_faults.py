"""Faults on the host: waits of the GPU thread for input, programs, locks, disks, the network, the CPU, and sleeps."""

from collections import Counter
from dataclasses import replace

from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.diagnose.processes.activity import Activity
from stallscope.diagnose.processes.buckets import SHARED_LOCK, TERMINAL, is_lock_holder, text_of
from stallscope.diagnose.processes.code_locations import is_own, short, user_line
from stallscope.diagnose.processes.fault import Case, Fault, sampled
from stallscope.diagnose.processes.loader_workers import workers_of
from stallscope.events.layout import Array
from stallscope.events.names import Category, HostKind, OffCpuFlag, SampleRole


def input_starvation(case: Case) -> Fault | None:
    bucket, child = case.bucket("input_starvation"), case.bucket("child_wait")
    workers = workers_of(case.activity)
    is_child_input = bool(workers.n) and child.share > 0
    share = bucket.share + (child.share if is_child_input else 0.0)
    if not share:
        return None
    line = (bucket if bucket.share >= child.share else child).line
    if bucket.parts.of("in the main process") > 0.5 * bucket.share > 0:
        return Fault(
            "input_starvation",
            "loads and transforms its input in the main process",
            share,
            line,
            ["Set num_workers, so that the input is prepared while the GPU works."],
            sampled(bucket),
        )
    title, advice = workers.words()
    data = merged(sampled(bucket if bucket.share >= child.share else child), workers.evidence())
    return Fault("input_starvation", title, share, workers.line or line, advice, data)


def child_program(case: Case) -> Fault | None:
    bucket = case.bucket("child_program")
    child = case.bucket("child_wait")
    if not workers_of(case.activity).n and child.share > bucket.share:
        bucket = child
    if not bucket.n_samples:
        return None  # the ledger alone does not show that it is a program
    programs = Counter[str]()
    for row in case.activity.of_role(SampleRole.CHILD):
        programs[text_of(row, "owner_comm")] += int(row["n"])
    name = bucket.object.removeprefix("end of ").removeprefix("pipe written by ").removeprefix(
        "pipe"
    ) or next((comm for comm, _ in programs.most_common(1)), "a program")
    is_reading = bucket.object.startswith("pipe")
    return Fault(
        "child_program",
        f"waits for the output of a program: {name}"
        if is_reading
        else f"waits for a program that it started: {name}",
        bucket.share,
        bucket.line,
        ["Remove the program from the step: start it in the background, or do its work in the process."],
        replace(sampled(bucket), program=name),
    )


def full_pipe(case: Case) -> Fault | None:
    bucket = case.bucket("full_pipe")
    if not bucket.share:
        return None
    reader = bucket.object.removeprefix("full pipe read by ")
    return Fault(
        "full_pipe",
        f"writes to a full {'terminal' if reader.startswith(TERMINAL) else 'pipe'} whose reader is slow: {reader}",
        bucket.share,
        bucket.line,
        ["Write less, or write from a separate thread. Check why the reader of the pipe is slow."],
        replace(sampled(bucket), reader=reader),
    )


def file_lock(case: Case) -> Fault | None:
    bucket = case.bucket("file_lock")
    if not bucket.share:
        return None
    is_polling = bucket.parts.of("polling") > 0.5 * bucket.share
    return Fault(
        "file_lock",
        f"{'sleeps until it gets the' if is_polling else 'waits for a'} {bucket.object or 'file lock'}",
        bucket.share,
        bucket.line,
        ["Give each process its own file, or hold the lock for a shorter time."],
        replace(sampled(bucket), lock=bucket.object),
    )


def recompilation(case: Case) -> Fault | None:
    bucket = case.bucket("recompilation")
    if not bucket.share:
        return None
    seconds = sorted(bucket.seconds)
    begin, end = case.activity.begin_ns // 10**9, (case.activity.begin_ns // 10**9) + case.activity.seconds
    is_at_start = not seconds or seconds[-1] - begin < 0.5 * (end - begin)
    if is_at_start:
        return None
    return Fault(
        "recompilation",
        "compiles code repeatedly",
        bucket.share,
        bucket.line,
        [
            "Keep the shapes the same (pad, or mark them dynamic): TORCH_LOGS=recompiles prints the reasons.",
            "Cache the compiled code; compile before the loop.",
        ],
        replace(sampled(bucket), n_seconds_with_compilation=len(seconds)),
    )


def checkpoint(case: Case) -> Fault | None:
    bucket = case.bucket("checkpoint")
    if not bucket.share:
        return None
    return Fault(
        "checkpoint",
        "saves a checkpoint while the GPU waits",
        bucket.share,
        bucket.line,
        ["Save less often, or asynchronously: copy to pinned memory, write from a thread."],
        replace(sampled(bucket), file=bucket.object or None),
    )


def interpreter_lock(case: Case) -> Fault | None:
    bucket, others = case.bucket("gil"), case.activity.of_role(SampleRole.SAME_PROCESS)
    is_holder = is_lock_holder(others)
    holder = _most_frequent_line(
        case.activity, others[is_holder if is_holder.any() else others["category"] == Category.ON_CPU]
    )
    if not bucket.share or not holder:
        return None
    return Fault(
        "gil",
        f"waits for Python's interpreter lock, which another thread holds at {short(holder)}",
        bucket.share,
        holder,
        ["Move that thread's work into another process, or into code that releases the interpreter lock."],
        replace(sampled(bucket), holder=holder, waits_at=bucket.line),
    )


def _most_frequent_line(activity: Activity, samples: Array, *, is_own_only: bool = False) -> str:
    """The line with most of these samples; empty without samples."""
    lines: Counter[str] = Counter()
    for row in samples:
        line = user_line(activity.frames(row))
        if is_own(line) or not is_own_only:
            lines[line] += int(row["n"])
    return next((line for line, _ in lines.most_common(1)), "")


def thread_lock(case: Case) -> Fault | None:
    bucket = case.bucket("lock_contention")
    if not bucket.share:
        return None
    if bucket.objects.of(SHARED_LOCK) > 0.5 * bucket.share:
        return Fault(
            "lock_contention",
            f"waits for {SHARED_LOCK}",
            bucket.share,
            bucket.line,
            ["Hold the lock for a shorter time in the other processes, or give each process its own."],
            sampled(bucket),
        )
    others = case.activity.of_role(SampleRole.SAME_PROCESS)
    other = _most_frequent_line(case.activity, others, is_own_only=True)
    at = f", which is at {short(other)}" if other else ""
    return Fault(
        "lock_contention",
        f"waits for another thread of its process{at}",
        bucket.share,
        other or bucket.line,
        ["Shorten the work of that thread, or do not wait for it in each step."],
        replace(sampled(bucket), waits_at=bucket.line, other_thread=other),
    )


def disk(case: Case) -> Fault | None:
    bucket = case.bucket("block_io")
    if not bucket.share:
        return None
    writes = bucket.parts.of("write") + bucket.parts.of("fsync")
    is_write = writes > 0.5 * bucket.share
    verb = "writes to a disk" if is_write else "reads from a disk"
    return Fault(
        "block_io",
        f"{verb}{f' ({bucket.object})' if bucket.object else ''}",
        bucket.share,
        bucket.line,
        ["Write from a thread, less often, and without fsync in the step."]
        if is_write
        else ["Read ahead in a worker, or keep the data in memory or on a faster disk."],
        replace(sampled(bucket), file=bucket.object or None),
    )


def network(case: Case) -> Fault | None:
    bucket = case.bucket("network_wait")
    if not bucket.n_samples:
        return None  # an event loop may also wait for a thread of its process
    is_local = bucket.object.startswith("a Unix socket")
    return Fault(
        "network_wait",
        f"waits for {'another process' if is_local else 'the network'}{f' ({bucket.object})' if bucket.object else ''}",
        bucket.share,
        bucket.line,
        ["Do not wait for the other side in the step: send from a thread with a bounded queue."],
        replace(sampled(bucket), peer=bucket.object or None),
    )


def page_faults(case: Case) -> Fault | None:
    bucket = case.bucket("page_fault")
    major = case.trace.host_events
    major = major[(major["pid"] == case.activity.pid) & (major["kind"] == HostKind.MAJOR_FAULT)]
    if not bucket.share:
        return None
    is_cold = bool(len(major)) or bucket.parts.of("disk") > 0
    files = sorted({text.decode("utf-8", "replace") for text in major["device"].tolist() if text})
    return Fault(
        "page_fault",
        "reads mapped memory that is not in the page cache yet"
        if is_cold
        else "touches new memory repeatedly",
        bucket.share,
        bucket.line,
        ["Read the file once before the loop, or in a worker (madvise, larger reads)."]
        if is_cold
        else ["Reuse buffers, so that the kernel need not map and clear new pages in each step."],
        replace(sampled(bucket), n_major_faults=len(major), devices=files[:3] or None),
    )


def preemption(case: Case) -> Fault | None:
    bucket, activity = case.bucket("cpu_preemption"), case.activity
    share = bucket.share
    if not share:
        return None
    events = case.trace.host_events
    quotas = events[(events["pid"] == activity.pid) & (events["kind"] == HostKind.THROTTLED)]
    off = case.trace.offcpu
    off = off[(off["node"] == activity.node) & (off["pid"] == activity.pid) & (off["runnable_ns"] > 0)]
    by_quota = off["duration_ns"][off["flags"] & OffCpuFlag.THROTTLED > 0].sum()
    if len(quotas) and (not len(off) or 2 * by_quota > off["duration_ns"].sum()):
        quota = quotas["detail"][0].decode("utf-8", "replace")
        group = quotas["file"][0].decode("utf-8", "replace")
        return Fault(
            "cpu_quota",
            f"is kept off the CPU by the quota of its control group ({quota})",
            share,
            bucket.line,
            ["Raise the CPU limit of the container or service, or use fewer threads."],
            CauseEvidence(quota=quota, control_group=group),
        )
    by = Counter[str]()
    for row in off:
        if row["by_comm"]:
            by[text_of(row, "by_comm")] += int(row["runnable_ns"])
    names = [name for name, _ in by.most_common(3)]
    return Fault(
        "cpu_preemption",
        f"competes for its CPU with {', '.join(names)}"
        if names
        else "competes for its CPU with other programs",
        share,
        bucket.line,
        [
            "Give the process its own CPUs (cpuset), or move the other programs; use no more threads than CPUs."
        ],
        CauseEvidence(by=names),
    )


def stopped(case: Case) -> Fault | None:
    share = case.activity.budget["stopped"]
    return (
        Fault(
            "process_stopped",
            "is stopped by a signal or a debugger",
            share,
            "",
            ["Find the sender of the signal."],
        )
        if share
        else None
    )


def sleep(case: Case) -> Fault | None:
    bucket = case.bucket("host_sleep")
    if not bucket.share:
        return None
    return Fault(
        "host_sleep",
        "sleeps",
        bucket.share,
        bucket.line,
        ["Remove the sleep, or wait for the event itself instead of polling."],
        sampled(bucket),
    )
