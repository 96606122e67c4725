"""Named faults of one process. Constant faults are named as well: no faster period is needed for comparison.

Each fault has its share of the wall clock, the largest gain if it were removed, the line of code and the next action.
A fault on the host cannot cost more than the share in which the GPU was idle, if that share is known.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stallscope.diagnose.processes import code_locations
from stallscope.diagnose.processes.activity import Activity, Calls, item_of
from stallscope.diagnose.processes.buckets import Bucket, buckets, text_of
from stallscope.diagnose.processes.code_locations import matches, short, user_line
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.names import Category, HostKind, OffCpuFlag, SampleRole
from stallscope.events.trace import Trace


@dataclass(frozen=True)
class Fault:
    """cause: its name. title: completes "because it ...". share: of the wall clock. line: of the user's code."""

    cause: str
    title: str
    share: float
    line: str
    advice: list[str]
    evidence: dict[str, object] = field(default_factory=dict)
    is_of_gpu: bool = False

    def lost(self, activity: Activity) -> float:
        """The largest share of the wall clock that the process could save."""
        busy = activity.gpu_busy
        return self.share if self.is_of_gpu or busy is None else min(self.share, 1 - busy)

    def gain(self, activity: Activity) -> float:
        """The largest speedup of the process if the fault were removed."""
        return 1 / max(1 - self.lost(activity), 0.02)


@dataclass(frozen=True)
class _Case:
    trace: Trace
    activity: Activity
    buckets: dict[str, Bucket]
    limits: Thresholds

    def bucket(self, name: str) -> Bucket:
        return self.buckets.get(name, Bucket())


def faults(trace: Trace, activity: Activity, limits: Thresholds) -> list[Fault]:
    """The faults of a process that cost at least limits.fault_share, the largest first."""
    case = _Case(trace, activity, buckets(activity), limits)
    candidates = [fault for rule in _RULES if (fault := rule(case)) is not None]
    costly = [fault for fault in candidates if fault.lost(activity) >= limits.fault_share]
    named = [fault for fault in costly if fault.cause != "low_utilisation"] or costly
    return sorted(named, key=lambda fault: -fault.share)


def _evidence(bucket: Bucket) -> dict[str, object]:
    parts = {name: round(share, 3) for name, share in bucket.parts.largest(4) if share >= 0.01}
    out: dict[str, object] = {"n_samples": bucket.n_samples}
    if len(parts) > 1:
        out["parts"] = [f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts.items()]
    return out


def _input(case: _Case) -> Fault | None:
    bucket, child = case.bucket("input_starvation"), case.bucket("child_wait")
    workers = _workers(case.activity)
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
            _evidence(bucket),
        )
    title, advice = workers.words()
    evidence = _evidence(bucket if bucket.share >= child.share else child) | workers.evidence()
    return Fault("input_starvation", title, share, workers.line or line, advice, evidence)


@dataclass
class _Workers:
    """The activity of worker processes while the GPU thread was blocked. n: samples in which they worked."""

    n: int = 0
    pids: set[int] = field(default_factory=set)
    states: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    objects: Counter[str] = field(default_factory=Counter)

    @property
    def line(self) -> str:
        return next((line for line, _ in self.lines.most_common(1)), "")

    def words(self) -> tuple[str, list[str]]:
        """The state that delays the workers, as text, and the next action."""
        state = next((name for name, _ in self.states.most_common(1)), "")
        name = next((text for text, _ in self.objects.most_common(1)), "")
        about = f" ({name})" if name else ""
        if state == "disk":
            return f"waits for its input, whose workers wait for a disk{about}", [
                "Move the data to a faster disk, read larger pieces, or keep it in memory."
            ]
        if state == "file_lock":
            return f"waits for its input, whose workers wait for a file lock{about}", [
                "Give each worker its own file or connection, so that the workers share no lock."
            ]
        if state == "network":
            return f"waits for its input, whose workers wait for the network{about}", [
                "Cache the data on this machine, or fetch more of it at the same time."
            ]
        if state == "locks":
            return "waits for its input, whose workers wait for a lock that they share", [
                "Remove the lock among the workers, or hold it for a shorter time."
            ]
        if state == "sleep":
            return "waits for its input, whose workers sleep", ["Remove the sleep from the workers."]
        if state == "on_cpu":
            return f"waits for its input: {len(self.pids)} workers compute without a pause", [
                "Raise num_workers, or make the transform cheaper (the line is in the workers).",
                "Check that the workers have their own CPUs.",
            ]
        return "waits for its input", ["Raise num_workers and prefetch_factor, or make the input cheaper."]

    def evidence(self) -> dict[str, object]:
        whole = max(sum(self.states.values()), 1)
        states = [f"{name.replace('_', ' ')} {n / whole:.0%}" for name, n in self.states.most_common(3)]
        return {"n_workers": len(self.pids), "workers": states} if self.pids else {}


def _workers(activity: Activity) -> _Workers:
    workers = _Workers()
    for row in activity.of_role(SampleRole.CHILD):
        frames = activity.frames(row)
        is_worker = text_of(row, "owner_comm").startswith("pt_data_worker") or matches(
            frames, code_locations.WORKS_FOR_LOADER
        )
        if not is_worker or matches(frames, code_locations.HELPER):
            continue
        workers.pids.add(int(row["owner_pid"]))
        text = text_of(row, "object")
        state = item_of(int(row["category"]))
        if text.startswith("lock on"):
            state = "file_lock"
        if text.startswith(("pipe", "full pipe", "a Unix")) or (state == "locks" and _waits_for_work(frames)):
            continue  # it waits for work, or for room to return its result
        n = int(row["n"])
        workers.n += n
        workers.states[state] += n
        if line := user_line(frames):
            workers.lines[line] += n
        if text:
            workers.objects[text] += n
    return workers


def _waits_for_work(frames: tuple[str, ...]) -> bool:
    return any("multiprocessing/queues.py" in frame for frame in frames[:3])


def _child_program(case: _Case) -> Fault | None:
    bucket = case.bucket("child_program")
    child = case.bucket("child_wait")
    if not _workers(case.activity).n and child.share > bucket.share:
        bucket = child
    if not bucket.share:
        return None
    programs = Counter[str]()
    for row in case.activity.of_role(SampleRole.CHILD):
        programs[text_of(row, "owner_comm")] += int(row["n"])
    name = bucket.object.removeprefix("end of ").removeprefix("pipe written by ") or next(
        (comm for comm, _ in programs.most_common(1)), "a program"
    )
    return Fault(
        "child_program",
        f"waits for a program that it started: {name}",
        bucket.share,
        bucket.line,
        ["Remove the program from the step: start it in the background, or do its work in the process."],
        _evidence(bucket) | {"program": name},
    )


def _full_pipe(case: _Case) -> Fault | None:
    bucket = case.bucket("full_pipe")
    if not bucket.share:
        return None
    reader = bucket.object.removeprefix("full pipe read by ")
    return Fault(
        "full_pipe",
        f"writes to a full pipe whose reader is slow: {reader}",
        bucket.share,
        bucket.line,
        ["Write less, or write from a separate thread. Check why the reader of the pipe is slow."],
        _evidence(bucket) | {"reader": reader},
    )


def _file_lock(case: _Case) -> Fault | None:
    bucket = case.bucket("file_lock")
    if not bucket.share:
        return None
    return Fault(
        "file_lock",
        f"waits for a {bucket.object or 'file lock'}",
        bucket.share,
        bucket.line,
        ["Give each process its own file, or hold the lock for a shorter time."],
        _evidence(bucket) | {"lock": bucket.object},
    )


def _compiles(case: _Case) -> Fault | None:
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
        _evidence(bucket) | {"n_seconds_with_compilation": len(seconds)},
    )


def _checkpoint(case: _Case) -> Fault | None:
    bucket = case.bucket("checkpoint")
    if not bucket.share:
        return None
    return Fault(
        "checkpoint",
        "saves a checkpoint while the GPU waits",
        bucket.share,
        bucket.line,
        ["Save less often, or asynchronously: copy to pinned memory, write from a thread."],
        _evidence(bucket) | ({"file": bucket.object} if bucket.object else {}),
    )


def _gil(case: _Case) -> Fault | None:
    bucket = case.bucket("gil")
    holder = _other_threads(case.activity, is_running=True)
    if not bucket.share or not holder:
        return None
    return Fault(
        "gil",
        f"waits for Python's interpreter lock, which another thread holds at {short(holder)}",
        bucket.share,
        holder,
        ["Move that thread's work into another process, or into code that releases the interpreter lock."],
        _evidence(bucket) | {"holder": holder, "waits_at": bucket.line},
    )


def _other_threads(activity: Activity, *, is_running: bool) -> str:
    """The most frequent line of the threads that the GPU thread waits for."""
    lines: Counter[str] = Counter()
    for row in activity.of_role(SampleRole.SAME_PROCESS):
        line = user_line(activity.frames(row))
        if line and (not is_running or row["category"] == Category.ON_CPU):
            lines[line] += int(row["n"])
    return next((line for line, _ in lines.most_common(1)), "")


def _lock(case: _Case) -> Fault | None:
    bucket = case.bucket("lock_contention")
    if not bucket.share:
        return None
    other = _other_threads(case.activity, is_running=False)
    at = f", which is at {short(other)}" if other else ""
    return Fault(
        "lock_contention",
        f"waits for another thread of its process{at}",
        bucket.share,
        other or bucket.line,
        ["Shorten the work of that thread, or do not wait for it in each step."],
        _evidence(bucket) | {"waits_at": bucket.line, "other_thread": other},
    )


def _io(case: _Case) -> Fault | None:
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
        _evidence(bucket) | ({"file": bucket.object} if bucket.object else {}),
    )


def _network(case: _Case) -> Fault | None:
    bucket = case.bucket("network_wait")
    if not bucket.share:
        return None
    return Fault(
        "network_wait",
        f"waits for the network{f' ({bucket.object})' if bucket.object else ''}",
        bucket.share,
        bucket.line,
        ["Do not wait for the other side in the step: send from a thread with a bounded queue."],
        _evidence(bucket) | ({"peer": bucket.object} if bucket.object else {}),
    )


def _page_faults(case: _Case) -> Fault | None:
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
        _evidence(bucket) | {"n_major_faults": len(major)} | ({"devices": files[:3]} if files else {}),
    )


def _preempted(case: _Case) -> Fault | None:
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
            {"quota": quota, "control_group": group},
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
        {"by": names},
    )


def _stopped(case: _Case) -> Fault | None:
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


def _sleep(case: _Case) -> Fault | None:
    bucket = case.bucket("host_sleep")
    if not bucket.share:
        return None
    return Fault(
        "host_sleep",
        "sleeps",
        bucket.share,
        bucket.line,
        ["Remove the sleep, or wait for the event itself instead of polling."],
        _evidence(bucket),
    )


def _driver(case: _Case) -> Fault | None:
    bucket = case.bucket("driver")
    if not bucket.share:
        return None
    return Fault(
        "driver", "waits in the GPU's driver", bucket.share, bucket.line, ["Trace with --gpu-ioctls."], {}
    )


def _allocation(case: _Case) -> Fault | None:
    bucket, calls = case.bucket("cuda_alloc"), case.activity.calls
    share = case.activity.budget["allocation"]
    if not share:
        return None
    rate = calls["allocate"].per_second + calls["free"].per_second
    return Fault(
        "cuda_alloc",
        f"allocates and frees GPU memory {rate:,.0f} times a second",
        share,
        bucket.line,
        ["Keep buffers between steps; call no empty_cache() in the loop; see expandable_segments."],
        _evidence(bucket) | {"calls_per_second": round(rate, 1)},
    )


def _pageable(case: _Case) -> Fault | None:
    activity, bucket = case.activity, case.bucket("host_device_copy")
    pageable, unknown = activity.calls["pageable_copy"], activity.calls["copy_of_unknown_memory"]
    share = pageable.share + (unknown.share if _blocks(unknown) else 0.0)
    if not share:
        return None
    speed = pageable if pageable.n_seen else unknown
    rate = speed.bytes_per_call / max(speed.mean_us, 0.001) / 1e3
    return Fault(
        "pageable_copy",
        f"copies from or to memory that is not pinned ({rate:.1f} GB/s)",
        min(share, max(bucket.share, share)),
        bucket.line,
        ["Pin the memory (pin_memory=True) and copy with non_blocking=True."],
        _evidence(bucket)
        | {
            "gb_per_second": round(rate, 2),
            "copies_per_second": round(pageable.per_second + unknown.per_second, 1),
        },
    )


_PINNED_BYTES_PER_US = 55_000
"""A pinned copy over PCIe 5 x16; an asynchronous copy of pinned memory returns at once."""


def _blocks(calls: Calls) -> bool:
    """Whether the calls take at least as long as the copy itself, that is, they are staged through pinned memory."""
    return calls.bytes_per_call >= 1 << 18 and calls.mean_us > max(
        calls.bytes_per_call / _PINNED_BYTES_PER_US, 30.0
    )


def _copies(case: _Case) -> Fault | None:
    bucket = case.bucket("host_device_copy")
    if not bucket.share or _pageable(case) is not None:
        return None
    return Fault(
        "host_device_copy",
        "copies between host and GPU",
        bucket.share,
        bucket.line,
        ["Copy less, or on a separate stream while the GPU works."],
        _evidence(bucket),
    )


def _syncs(case: _Case) -> Fault | None:
    activity, limits = case.activity, case.limits
    syncs, launches = activity.calls["synchronise"], activity.calls["launch"]
    graphs = activity.calls["graph_launch"]
    rate = max(syncs.per_second, activity.calls["read_back"].per_second)
    if rate < limits.many_syncs_per_s or syncs.mean_us > limits.short_sync_us:
        return None
    if graphs.is_supported and graphs.per_second > 0.3 * rate:
        return None
    if launches.is_supported and launches.per_second > limits.launches_per_sync * rate:
        return None
    bucket = case.bucket("gpu_wait")
    line = _sync_line(case)
    share = bucket.share + _same_function(case, line)
    return Fault(
        "excessive_sync",
        f"waits for the GPU {rate:,.0f} times a second",
        share,
        line,
        [
            "Keep values on the GPU: no .item(), .cpu(), print or comparison of tensors for each layer or step."
        ],
        _evidence(bucket) | {"syncs_per_second": round(rate, 1), "mean_us": round(syncs.mean_us, 1)},
    )


def _sync_line(case: _Case) -> str:
    """The line with most of the waits, or with most of the copies if no wait was sampled."""
    return case.bucket("gpu_wait").line or case.bucket("host_device_copy").line


def _same_function(case: _Case, line: str) -> float:
    """The share of the host's work in the function that waits: its launches precede the next wait."""
    return sum(
        share
        for name in ("host_compute", "host_device_copy")
        for other, share in case.bucket(name).lines.by_name.items()
        if _function(other) == _function(line)
    )


def _function(line: str) -> tuple[str, str]:
    location, _, function = line.rpartition(" ")
    return location.rpartition(":")[0], function


def _is_launch_bound(case: _Case) -> bool:
    activity, limits = case.activity, case.limits
    launches = activity.calls["launch"]
    host = activity.budget["on_cpu"] + activity.budget["launches"]
    if (
        not launches.is_supported
        or launches.per_second < limits.many_launches_per_s
        or _syncs(case) is not None
    ):
        return False
    busy = activity.gpu_busy
    is_idle = busy < limits.busy_gpu_share if busy is not None else activity.budget["gpu_wait"] < 0.15
    if not is_idle or host < limits.launching_share:
        return False
    return launches.per_second / max(host, 0.01) >= limits.launches_per_cpu_s


def _launch_bound(case: _Case) -> Fault | None:
    if not _is_launch_bound(case):
        return None
    bucket = case.bucket("host_compute")
    launches = case.activity.calls["launch"]
    return Fault(
        "launch_bound",
        f"launches {launches.per_second:,.0f} small kernels a second: the GPU waits for the next one",
        bucket.share,
        bucket.line,
        ["Use CUDA graphs (torch.compile mode=reduce-overhead), fuse operations, or enlarge the batch."],
        _evidence(bucket) | {"launches_per_second": round(launches.per_second)},
    )


def _compute(case: _Case) -> Fault | None:
    bucket = case.bucket("host_compute")
    busy = case.activity.gpu_busy
    if (
        not bucket.share
        or _is_launch_bound(case)
        or (busy is not None and busy >= case.limits.busy_gpu_share)
    ):
        return None
    share = bucket.share - (_same_function(case, _sync_line(case)) if _syncs(case) else 0.0)
    top = bucket.lines.largest()
    is_collecting = any(
        code_locations.COLLECTS.search(frame)
        for row in case.activity.of_role(SampleRole.GPU)
        for frame in case.activity.frames(row)[:1]
    )
    return Fault(
        "host_compute",
        "collects garbage" if is_collecting else "computes on the CPU",
        max(share, 0.0),
        bucket.line,
        ["Move this work out of the loop, to a worker or to the GPU, or make it cheaper."],
        _evidence(bucket) | ({"share_of_line": round(top[0][1], 3)} if top else {}),
    )


def _throttled(case: _Case) -> Fault | None:
    gpu = case.activity.gpu
    if gpu is None or not gpu.sm_mhz or not gpu.sm_max_mhz or not gpu.throttled:
        return None
    clock_share = gpu.sm_mhz / gpu.sm_max_mhz
    reason, share = max(gpu.throttled.items(), key=lambda item: item[1])
    limits = case.limits
    least = limits.power_capped_clock_share if reason == "software power cap" else limits.slowed_clock_share
    if share < 0.2 or clock_share >= least:
        return None
    return Fault(
        "gpu_throttled",
        f"runs its GPU at {gpu.sm_mhz:.0f} of {gpu.sm_max_mhz} MHz ({reason})",
        (1 - clock_share) * share,
        "",
        ["Check the power limit, the cooling and the supply of this GPU (nvidia-smi -q -d PERFORMANCE)."],
        {"reason": reason, "share_of_time": share},
        is_of_gpu=True,
    )


def _shared(case: _Case) -> Fault | None:
    gpu = case.activity.gpu
    if gpu is None or not gpu.others or not gpu.others_busy:
        return None
    return Fault(
        "gpu_shared",
        f"shares its GPU with {', '.join(gpu.others[:3])}",
        min(gpu.others_busy, case.activity.budget["gpu_wait"] + case.activity.budget["launches"]),
        "",
        ["Move the other process to another GPU, or limit both (MIG, MPS)."],
        {"others": list(gpu.others[:5]), "busy_for_others": round(gpu.others_busy, 3)},
        is_of_gpu=True,
    )


def _low(case: _Case) -> Fault | None:
    activity = case.activity
    busy = activity.gpu_busy
    if busy is None or busy >= case.limits.busy_gpu_share or activity.budget["gpu_wait"] < 0.5:
        return None
    if _syncs(case) is not None:
        return None
    bucket = case.bucket("gpu_wait")
    return Fault(
        "low_utilisation",
        "keeps its GPU busy with short work only, while the host has no other work",
        1 - busy,
        bucket.line,
        ["Enlarge the batch, or let the host run ahead of the GPU."],
        {"gpu_busy": round(busy, 3)},
    )


_RULES: tuple[Callable[[_Case], Fault | None], ...] = (
    _input,
    _child_program,
    _full_pipe,
    _file_lock,
    _compiles,
    _checkpoint,
    _gil,
    _lock,
    _io,
    _network,
    _page_faults,
    _preempted,
    _stopped,
    _sleep,
    _driver,
    _allocation,
    _pageable,
    _copies,
    _syncs,
    _launch_bound,
    _compute,
    _throttled,
    _shared,
    _low,
)
