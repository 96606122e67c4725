"""The kernels of a GPU in a window: time by kernel, how busy the GPU was, and the part of NCCL's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stallscope.events.layout import Array

_NCCL = ("ncclDevKernel", "ncclKernel")


OTHER_KERNELS = "(other kernels: too many names)"


def is_nccl_kernel(name: str) -> bool:
    """Whether a kernel belongs to NCCL, by its name."""
    return any(part in name for part in _NCCL)


@dataclass(frozen=True)
class KernelRow:
    """All runs of a kernel. share: of the time of all kernels, which may overlap."""

    name: str
    n: int
    total_ms: float
    mean_us: float
    max_us: float
    share: float
    is_nccl: bool


@dataclass(frozen=True)
class GpuWindow:
    """One GPU of the process. busy: share of the window in which a kernel ran; busy_in_nccl: only kernels of NCCL ran;
    longest_idle_ms: the longest time without a kernel.
    """

    device: int
    window_ms: float
    busy: float
    busy_in_nccl: float
    longest_idle_ms: float
    n_kernels: int
    n_streams: int
    kernels: tuple[KernelRow, ...]


def gpu_windows(kernels: Array, names: Sequence[str], *, begin_ns: int, end_ns: int) -> list[GpuWindow]:
    """The window of each GPU, by its number. kernels: start_ns, end_ns, name (index in names), stream and device.

    Kernels that began before the window, or ended after it, count with the part inside.
    """
    start = np.clip(kernels["start_ns"].astype(np.int64), begin_ns, end_ns)
    end = np.clip(kernels["end_ns"].astype(np.int64), begin_ns, end_ns)
    is_inside = end > start
    kernels, start, end = kernels[is_inside], start[is_inside], end[is_inside]
    label = np.array([*names, OTHER_KERNELS], object)
    which = np.minimum(kernels["name"].astype(np.int64), len(names))
    is_nccl = np.array([is_nccl_kernel(name) for name in label], bool)
    out = []
    for device in np.unique(kernels["device"]).tolist():
        own = kernels["device"] == device
        busy_ns, longest_idle_ns = _covered(start[own], end[own], begin_ns, end_ns)
        is_work = own & ~is_nccl[which]
        work_ns, _ = _covered(start[is_work], end[is_work], begin_ns, end_ns)
        window_ns = max(end_ns - begin_ns, 1)
        out.append(
            GpuWindow(
                device=device,
                window_ms=window_ns / 1e6,
                busy=busy_ns / window_ns,
                busy_in_nccl=(busy_ns - work_ns) / window_ns,
                longest_idle_ms=longest_idle_ns / 1e6,
                n_kernels=int(own.sum()),
                n_streams=len(np.unique(kernels["stream"][own])),
                kernels=_rows(label, which[own], (end - start)[own], is_nccl),
            )
        )
    return out


def _rows(label: Array, which: Array, duration_ns: Array, is_nccl: Array) -> tuple[KernelRow, ...]:
    n = np.bincount(which, minlength=len(label))
    total = np.bincount(which, weights=duration_ns, minlength=len(label))
    longest = np.zeros(len(label))
    np.maximum.at(longest, which, duration_ns)
    all_ns = max(float(total.sum()), 1.0)
    order = [number for number in np.argsort(-total, kind="stable").tolist() if n[number]]
    return tuple(
        KernelRow(
            name=str(label[number]),
            n=int(n[number]),
            total_ms=float(total[number]) / 1e6,
            mean_us=float(total[number] / n[number]) / 1e3,
            max_us=float(longest[number]) / 1e3,
            share=float(total[number]) / all_ns,
            is_nccl=bool(is_nccl[number]),
        )
        for number in order
    )


def _covered(start_ns: Array, end_ns: Array, first_ns: int, last_ns: int) -> tuple[int, int]:
    """The time that intervals cover, and the longest time that they do not."""
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns = start_ns[order], end_ns[order]
    reached = np.maximum.accumulate(np.concatenate([[first_ns], end_ns]))
    idle = np.maximum(np.append(start_ns, last_ns) - reached, 0)
    return int(last_ns - first_ns - idle.sum()), int(idle.max())
