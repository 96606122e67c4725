"""`stallscope look`: the kernels of a running process for some seconds, by CUPTI."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson
from stallscope.errors import writing
from stallscope.store import file_modes

if TYPE_CHECKING:
    from stallscope.capture.gpu import KernelWindow
    from stallscope.diagnose.views import GpuWindow

_NAME_LENGTH = 72


def look(
    pid: Annotated[int, typer.Option("--pid", help="The process, for example one rank of a job.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=60, help="Record for this time.")] = 5.0,
    top: Annotated[int, typer.Option("--top", min=1, help="Kernels to list for each GPU.")] = 15,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", help="Also write all kernels as a timeline for Perfetto (.pftrace)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record all kernels of a running process (intrusive).

    Loads CUPTI into the process, without a restart of the job. One waiting thread of the process is stopped for a few
    milliseconds to load the library. While the library records, each kernel costs the process about 1 us of CPU time,
    and no other profiler can start. If another profiler is already active, look refuses to start. At the end CUPTI is
    detached; the library stays loaded, without a thread. Needs root (or CAP_SYS_PTRACE) and x86-64. For longer
    recordings use `stallscope trace` and NCCL's plugin (`stallscope plugin path`).
    """
    from stallscope.capture.gpu import kernel_window
    from stallscope.diagnose.views import gpu_windows

    window = kernel_window(pid, seconds=seconds)
    if timeline:
        _write_timeline(window, pid, timeline)
    gpus = gpu_windows(window.kernels, window.names, begin_ns=window.begin_ns, end_ns=window.end_ns)
    if as_json:
        facts = {"pid": pid, "held_ms": round(window.held_ms, 3), "is_detached": window.is_detached}
        facts |= {"n_lost": window.n_lost, "seconds": (window.end_ns - window.begin_ns) / 1e9}
        typer.echo(json.dumps(facts | {"gpus": [asdict(gpu) for gpu in gpus]}))
        return
    for gpu in gpus:
        _print(gpu, top)
    if not gpus:
        typer.echo(f"no kernel ended in {(window.end_ns - window.begin_ns) / 1e9:.1f} s")
    typer.echo(_closing(window))


def _write_timeline(window: KernelWindow, pid: int, path: Path) -> None:
    import socket

    from stallscope.exporters.kernel_tracks import kernel_tracks
    from stallscope.exporters.perfetto import perfetto_bytes

    rank = f"rank {window.rank}" if window.rank >= 0 else "process"
    tracks = kernel_tracks(
        window.kernels,
        window.names,
        node=socket.gethostname(),
        process=f"{rank}: {window.process or 'pid'} {pid}",
        begin_ns=window.begin_ns,
        wall_ns=window.begin_wall_ns,
    )
    with (
        writing(path, "choose another --timeline"),
        file_modes.replacing(path) as new,
        new.open("wb") as file,
    ):
        file.writelines(perfetto_bytes(tracks))
    typer.echo(f"{path}: {len(window.kernels):,} kernels; open it in https://ui.perfetto.dev", err=True)


def _print(gpu: GpuWindow, top: int) -> None:
    typer.echo(
        f"GPU {gpu.device} of the process: busy {gpu.busy:.1%} of {gpu.window_ms / 1e3:.1f} s,"
        f" {gpu.busy_in_nccl:.1%} only with NCCL's kernels; idle for {gpu.longest_idle_ms:.1f} ms at most;"
        f" {gpu.n_kernels:,} kernels in {gpu.n_streams} streams"
    )
    typer.echo(f"  {'time':>6} {'total ms':>10} {'number':>8} {'mean us':>10} {'max us':>10}  kernel")
    for row in gpu.kernels[:top]:
        name = row.name if len(row.name) <= _NAME_LENGTH else f"{row.name[: _NAME_LENGTH - 3]}..."
        typer.echo(
            f"  {row.share:>6.1%} {row.total_ms:>10.2f} {row.n:>8,} {row.mean_us:>10.1f} {row.max_us:>10.1f}  {name}"
        )
    if len(gpu.kernels) > top:
        rest = sum(row.share for row in gpu.kernels[top:])
        typer.echo(f"  {rest:>6.1%} in {len(gpu.kernels) - top} other kernels (--top)")


def _closing(window: KernelWindow) -> str:
    left = (
        "CUPTI has left it"
        if window.is_detached
        else "CUPTI stays loaded, idle: the process made no CUDA call"
    )
    lost = f"; {window.n_lost:,} kernels lost" if window.n_lost else ""
    return f"a thread of the process was stopped for {window.held_ms:.1f} ms; {left}{lost}"
