"""Faults of GPU calls and of the work on the host between GPU calls, and states of the GPU itself."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes import code_locations
from stallscope.diagnose.processes.activity import Calls
from stallscope.diagnose.processes.buckets import Shares
from stallscope.diagnose.processes.code_locations import user_line
from stallscope.diagnose.processes.fault import Case, Fault, sampled
from stallscope.events.names import Op, SampleRole


def driver(case: Case) -> Fault | None:
    bucket = case.bucket("driver")
    if not bucket.share:
        return None
    return Fault(
        "driver", "waits in the GPU's driver", bucket.share, bucket.line, ["Trace with --gpu-ioctls."]
    )


def allocation(case: Case) -> Fault | None:
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
        ["Keep buffers between steps; do not call empty_cache() in the loop; try expandable_segments."],
        replace(sampled(bucket), calls_per_second=round(rate, 1)),
        occupies_gpu=True,
    )


def pageable_copies(case: Case) -> Fault | None:
    activity, bucket = case.activity, case.bucket("host_device_copy")
    pageable, unknown = activity.calls["pageable_copy"], activity.calls["copy_of_unknown_memory"]
    share = _copying(pageable) + (_copying(unknown) if _blocks(unknown) else 0.0)
    if not share:
        return None
    speed = pageable if pageable.n_seen else unknown
    rate = speed.bytes_per_call / max(speed.mean_us, 0.001) / 1e3
    return Fault(
        "pageable_copy",
        f"copies from or to memory that is not pinned ({rate:.1f} GB/s)",
        min(share, activity.budget["copies"]),
        bucket.line,
        ["Pin the memory (pin_memory=True) and copy with non_blocking=True."],
        replace(
            sampled(bucket),
            gb_per_second=round(rate, 2),
            copies_per_second=round(pageable.per_second + unknown.per_second, 1),
        ),
    )


_MIN_BYTES_PER_US = 1_000
"""A copy to host memory that is touched for the first time; slower calls also wait for the GPU's queue."""
_COPY_CALL_US = 20.0
"""The longest copy of a few bytes on a GPU without queued work."""


def _copying(calls: Calls) -> float:
    """The share of the wall clock in which calls copied. In the remaining time they waited for queued work of the GPU:
    a copy starts after the kernels before it, so a long call with few bytes is a wait for the GPU.
    """
    each_us = calls.bytes_per_call / _MIN_BYTES_PER_US + _COPY_CALL_US
    return calls.share * min(each_us / max(calls.mean_us, 0.001), 1.0)


_PINNED_BYTES_PER_US = 55_000
"""A pinned copy over PCIe 5 x16; an asynchronous copy of pinned memory returns at once."""


def _blocks(calls: Calls) -> bool:
    """Whether the calls take at least as long as the copy itself, that is, they are staged through pinned memory."""
    return calls.bytes_per_call >= 1 << 18 and calls.mean_us > max(
        calls.bytes_per_call / _PINNED_BYTES_PER_US, 30.0
    )


def copies(case: Case) -> Fault | None:
    bucket, calls = case.bucket("host_device_copy"), case.activity.calls
    waited = sum(kind.share - _copying(kind) for kind in (calls["read_back"], calls["copy_to_host"]))
    share = bucket.share - waited
    if share <= 0 or pageable_copies(case) is not None:
        return None
    return Fault(
        "host_device_copy",
        "copies between host and GPU",
        share,
        bucket.line,
        ["Copy less, or on a separate stream while the GPU works."],
        sampled(bucket),
    )


def excessive_syncs(case: Case) -> Fault | None:
    activity, limits = case.activity, case.limits
    syncs, launches = activity.calls["synchronise"], activity.calls["launch"]
    graphs = activity.calls["graph_launch"]
    rate = max(syncs.per_second, activity.calls["read_back"].per_second)
    if rate < limits.many_syncs_per_s or syncs.mean_us > limits.short_sync_us:
        return None
    if graphs.is_supported and graphs.per_second > 0.3 * rate:
        return None
    if activity.gpu_busy_at_least >= limits.working_sync_share:
        return None
    if launches.is_supported and launches.per_second > limits.launches_per_sync * rate:
        return None
    bucket = case.bucket("gpu_wait")
    line = _sync_line(case)
    share = (
        _same_function(case, line, "gpu_wait", "host_compute", "host_device_copy") if line else bucket.share
    )
    return Fault(
        "excessive_sync",
        f"waits for the GPU {rate:,.0f} times a second",
        share,
        line,
        [
            "Keep values on the GPU: no .item(), .cpu(), print or comparison of tensors for each layer or step."
        ],
        replace(sampled(bucket), syncs_per_second=round(rate, 1), mean_us=round(syncs.mean_us, 1)),
    )


def _sync_line(case: Case) -> str:
    """The line with most of the short waits and copies; without samples of them, the line with most of the work.

    Long waits are recorded with their lines, and are subtracted.
    """
    short = Shares(dict(case.bucket("gpu_wait").lines.by_name))
    for line, share in _long_waits(case).by_name.items():
        short.add(line, -share)
    for line, share in case.bucket("host_device_copy").lines.by_name.items():
        short.add(line, share)
    work = case.bucket("host_compute").lines
    candidates = [(line, share) for line, share in short.largest(1) if share >= _SAMPLED_SHARE]
    return next((line for line, _ in candidates or work.largest() or short.largest()), "")


_SAMPLED_SHARE = 0.02


def _long_waits(case: Case) -> Shares:
    """The share of the wall clock in recorded waits for the GPU, by line. Only long waits are recorded."""
    activity, calls = case.activity, case.trace.calls
    own = calls[(calls["node"] == activity.node) & (calls["pid"] == activity.pid) & (calls["op"] == Op.SYNC)]
    shares = Shares()
    for stack in np.unique(own["stack"]).tolist():
        rows = own[(own["stack"] == stack) & (own["duration_ns"] > 0)]
        line = user_line(case.trace.stacks.get(stack, ()))
        shares.add(line, float(rows["duration_ns"].sum()) / 1e9 / activity.seconds)
    return shares


def _same_function(case: Case, line: str, *names: str) -> float:
    """The share of these buckets in the function of a line."""
    return sum(
        share
        for name in names
        for other, share in case.bucket(name).lines.by_name.items()
        if code_locations.function(other) == code_locations.function(line)
    )


def is_launch_bound(case: Case) -> bool:
    activity, limits = case.activity, case.limits
    launches = activity.calls["launch"]
    host = activity.budget["on_cpu"] + activity.budget["launches"]
    if (
        not launches.is_supported
        or launches.per_second < limits.many_launches_per_s
        or excessive_syncs(case) is not None
    ):
        return False
    busy = activity.gpu_busy
    is_idle = busy < limits.busy_gpu_share if busy is not None else activity.budget["gpu_wait"] < 0.15
    if not is_idle or host < limits.launching_share:
        return False
    return launches.per_second / max(host, 0.01) >= limits.launches_per_cpu_s


def launch_bound(case: Case) -> Fault | None:
    if not is_launch_bound(case):
        return None
    bucket = case.bucket("host_compute")
    launches = case.activity.calls["launch"]
    return Fault(
        "launch_bound",
        f"launches {launches.per_second:,.0f} small kernels a second: the GPU waits for the next kernel",
        bucket.share,
        bucket.line,
        ["Use CUDA graphs (torch.compile mode=reduce-overhead), fuse operations, or enlarge the batch."],
        replace(sampled(bucket), launches_per_second=round(launches.per_second)),
    )


def compute(case: Case) -> Fault | None:
    bucket = case.bucket("host_compute")
    busy = case.activity.gpu_busy
    if not bucket.share or is_launch_bound(case) or (busy is not None and busy >= case.limits.busy_gpu_share):
        return None
    share = bucket.share - (
        _same_function(case, _sync_line(case), "host_compute") if excessive_syncs(case) else 0.0
    )
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
        replace(sampled(bucket), share_of_line=round(top[0][1], 3) if top else None),
    )


def throttled(case: Case) -> Fault | None:
    gpu = case.activity.gpu
    if gpu is None or not gpu.sm_mhz or not gpu.sm_max_mhz or not gpu.throttled:
        return None
    clock_share = gpu.sm_mhz / gpu.sm_max_mhz
    reason, share = max(gpu.throttled.items(), key=lambda item: item[1])
    if share < 0.2 or clock_share >= case.limits.slowed_clock_share:
        return None
    if reason == "software power cap" and not gpu.is_power_limited:
        return None
    return Fault(
        "gpu_throttled",
        f"runs its GPU at {gpu.sm_mhz:.0f} of {gpu.sm_max_mhz} MHz ({reason})",
        (1 - clock_share) * share,
        "",
        ["Check the power limit, the cooling and the supply of this GPU (nvidia-smi -q -d PERFORMANCE)."],
        CauseEvidence(reason=reason, share_of_time=share),
        is_of_gpu=True,
    )


def shared_gpu(case: Case) -> Fault | None:
    gpu = case.activity.gpu
    if gpu is None or not gpu.others or not gpu.others_busy:
        return None
    return Fault(
        "gpu_shared",
        f"shares its GPU with {', '.join(gpu.others[:3])}",
        min(gpu.others_busy, case.activity.budget["gpu_wait"] + case.activity.budget["launches"]),
        "",
        ["Move the other process to another GPU, or limit both (MIG, MPS)."],
        CauseEvidence(others=list(gpu.others[:5]), busy_for_others=round(gpu.others_busy, 3)),
        is_of_gpu=True,
    )


def low_utilisation(case: Case) -> Fault | None:
    activity = case.activity
    busy = activity.gpu_busy
    if busy is None or busy >= case.limits.busy_gpu_share or activity.budget["gpu_wait"] < 0.5:
        return None
    if excessive_syncs(case) is not None:
        return None
    bucket = case.bucket("gpu_wait")
    return Fault(
        "low_utilisation",
        "gives its GPU only short work, although the host has nothing else to do",
        1 - busy,
        bucket.line,
        ["Enlarge the batch, or let the host run ahead of the GPU."],
        CauseEvidence(gpu_busy=round(busy, 3), sm_active=activity.gpu.sm_active if activity.gpu else None),
    )
