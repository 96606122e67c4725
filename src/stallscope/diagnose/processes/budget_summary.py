"""The activity of processes as data for a report, and as the first lines of its text."""

from collections.abc import Mapping, Sequence
from typing import Any

from stallscope.diagnose.processes.activity import Activity, Calls, locations
from stallscope.diagnose.processes.buckets import with_timers_as_sleep
from stallscope.diagnose.processes.code_locations import short
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import SampleRole
from stallscope.events.trace import Trace

_WORDS = {
    "on_cpu": "on the CPU",
    "gpu_wait": "waiting for its GPU",
    "child": "child or input",
    "page_faults": "page faults",
}
_CALL_WORDS = {
    "launch": "launches",
    "graph_launch": "graph launches",
    "synchronise": "synchronisations",
    "read_back": "small copies to the host",
    "copy_to_device": "copies to the GPU",
    "copy_to_host": "copies to the host",
    "pageable_copy": "of them not pinned",
    "allocate": "allocations",
    "free": "frees",
}
_TRACED = frozenset(("nccl", "rccl"))
"""Libraries whose calls are traced; PyTorch loads them in every process."""
_BAR = 24
_MAX_IN_LINES = 8
_MAX_UNLIKE = 4
_WIDTH = 80
_MIN_SHARE = 0.005


def as_data(trace: Trace, activities: Sequence[Activity]) -> list[dict[str, Any]]:
    """One object for each process, as in the JSON of a report."""
    return [_data(trace, with_timers_as_sleep(activity)) for activity in activities]


def _data(trace: Trace, process: Activity) -> dict[str, Any]:
    return {
        "node": trace.nodes[process.node],
        "pid": process.pid,
        "rank": None if process.rank == UNKNOWN else process.rank,
        "command": process.command,
        "libraries": list(process.libraries),
        "seconds": round(process.seconds, 3),
        "idle_seconds": round(process.idle_seconds, 3),
        "start_seconds": round(process.start_seconds, 3),
        "budget": {name: round(share, 4) for name, share in process.budget.items() if share >= 0.0005},
        "gpu_wait_estimated": round(process.estimated_wait, 4),
        "gpu_busy": None if process.gpu_busy is None else round(process.gpu_busy, 3),
        "gpu_busy_at_least": round(process.gpu_busy_at_least, 3),
        "gpu": _gpu(process),
        "calls": {name: _call(calls) for name, calls in process.calls.items() if calls.is_supported},
        "silence": process.silence._asdict() if process.silence else None,
        "n_samples": process.n_samples,
        "locations": _locations(process, SampleRole.GPU),
        "other_threads": _locations(process, SampleRole.SAME_PROCESS),
        "child_processes": _locations(process, SampleRole.CHILD),
    }


def _gpu(process: Activity) -> dict[str, Any] | None:
    gpu = process.gpu
    if gpu is None:
        return None
    return {
        "number": gpu.number,
        "name": gpu.name,
        "busy": None if gpu.busy is None else round(gpu.busy, 3),
        "sm_active": None if gpu.sm_active is None else round(gpu.sm_active, 3),
        "memory_bandwidth": None if gpu.memory_bandwidth is None else round(gpu.memory_bandwidth, 3),
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "sm_mhz": None if gpu.sm_mhz is None else round(gpu.sm_mhz),
        "sm_max_mhz": gpu.sm_max_mhz,
        "power_w": None if gpu.power_w is None else round(gpu.power_w),
        "power_limit_w": None if gpu.power_limit_w is None else round(gpu.power_limit_w),
        "throttled": gpu.throttled,
        "other_processes": list(gpu.others),
        "busy_for_other_processes": round(gpu.others_busy, 3),
    }


def _call(calls: Calls) -> dict[str, Any]:
    return {
        "per_second": round(calls.per_second, 2),
        "share": round(calls.share, 4),
        "mean_us": round(calls.mean_us, 2),
        "bytes_per_call": round(calls.bytes_per_call),
        "is_estimate": calls.is_estimate,
    }


def _locations(process: Activity, role: SampleRole) -> list[dict[str, Any]]:
    return [
        {"line": at.line, "share": round(at.share, 3), "state": at.doing}
        for at in locations(process, role, most=5)
    ]


def lines(activity: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first lines of a report's text: a block for a single process, otherwise a line per process.

    Of many processes only those that wait least for their GPUs are listed, and one that waits most: a process that
    holds up the others does not wait. The answer then fits on a terminal of 24 lines together with these lines.
    """
    if len(activity) == 1:
        return ["", *_block(activity[0])]
    if not activity:
        return []
    title, shown = "Time budget by process (code, calls and GPUs: --json)", list(activity)
    if len(activity) > _MAX_IN_LINES:
        ordered = sorted(activity, key=lambda process: process["budget"].get("gpu_wait", 0.0))
        title = f"Time budget of {_MAX_UNLIKE} of {len(activity)} processes: the shortest GPU waits, and the longest"
        shown = [*ordered[: _MAX_UNLIKE - 1], ordered[-1]]
    used = sorted({", ".join(process["libraries"]) for process in activity if _is_untraced(process)})
    return ["", title, *map(_line, shown), *(f"  library {libraries}" for libraries in used)]


def _line(process: Mapping[str, Any]) -> str:
    """The name and the largest parts of the budget, on a terminal of 80 columns."""
    line = f"  {_name(process)}:"
    for part in _shares(process):
        longer = f"{line} {part}" if line.endswith(":") else f"{line}, {part}"
        line = longer if len(longer) <= _WIDTH else line
    return line


def _is_untraced(process: Mapping[str, Any]) -> bool:
    """Whether a process uses a communication library whose calls are not traced."""
    return bool(set(process["libraries"]) - _TRACED)


def _name(process: Mapping[str, Any]) -> str:
    rank = f"rank {process['rank']}, " if process["rank"] is not None else ""
    command = f" ({process['command']})" if process["command"] else ""
    return f"{rank}process {process['pid']}{command}"


def _shares(process: Mapping[str, Any]) -> list[str]:
    top = sorted(process["budget"].items(), key=lambda item: -item[1])[:4]
    return [f"{word(name)} {share:.0%}" for name, share in top if share >= _MIN_SHARE]


def word(item: str) -> str:
    """A budget item in words."""
    return _WORDS.get(item, item.replace("_", " "))


def _block(process: Mapping[str, Any]) -> list[str]:
    name = _name(process)
    idle = f", {process['idle_seconds']:.1f} s idle" if process["idle_seconds"] >= 1 else ""
    idle += f", {process['start_seconds']:.1f} s of start and end" if process["start_seconds"] >= 1 else ""
    out = [f"{name[0].upper()}{name[1:]}, {process['seconds']:.1f} s{idle}"]
    rows: list[tuple[str, str]] = []
    for i, (item, share) in enumerate(sorted(process["budget"].items(), key=lambda pair: -pair[1])):
        if share >= _MIN_SHARE:
            bar = f"{share:4.0%} {word(item):<20} {'█' * round(share * _BAR)}".rstrip()
            estimated = process["gpu_wait_estimated"] if item == "gpu_wait" else 0.0
            bar += f" ({estimated:.0%} estimated)" if estimated >= _MIN_SHARE else ""
            rows.append(("time" if i == 0 else "", bar))
    rows.append(("GPU", _gpu_line(process)))
    if _is_untraced(process):
        rows.append(("library", ", ".join(process["libraries"])))
    if calls := _calls_line(process["calls"]):
        rows.append(("calls", calls))
    for i, at in enumerate(process["locations"][:4]):
        rows.append(
            ("code" if i == 0 else "", f"{at['share']:4.0%} {short(at['line'])} ({word(at['state'])})")
        )
    if silence := process["silence"]:
        at = f" at {short(silence['line'])}" if silence["line"] else ""
        rows.append(
            (
                "now",
                f"no counted GPU call in the last {silence['seconds']:.0f} s: {word(silence['state'])}{at}",
            )
        )
    for title, key in (("thread", "other_threads"), ("child", "child_processes")):
        rows += [
            (title, f"{at['share']:4.0%} {short(at['line'])} ({word(at['state'])})")
            for at in process[key][:1]
        ]
    return out + [f"  {title:<8}{value}" for title, value in rows]


def _gpu_line(process: Mapping[str, Any]) -> str:
    gpu = process["gpu"]
    at_least = f"at least {process['gpu_busy_at_least']:.0%} by the host's waits"
    if gpu is None:
        return f"busy {at_least}; its driver was not queried"
    parts = [f"busy {gpu['busy']:.0%}, {at_least}" if gpu["busy"] is not None else f"busy {at_least}"]
    if gpu["sm_active"] is not None:
        parts.append(f"{gpu['sm_active']:.0%} of its multiprocessors at work")
    if gpu["memory_bandwidth"] is not None:
        parts.append(f"{gpu['memory_bandwidth']:.0%} of its memory bandwidth")
    if gpu["memory_total_bytes"] and gpu["memory_used_bytes"] is not None:
        parts.append(f"{gpu['memory_used_bytes'] / 2**30:.1f} of {gpu['memory_total_bytes'] / 2**30:.0f} GiB")
    if gpu["sm_mhz"] and gpu["sm_max_mhz"]:
        parts.append(f"{gpu['sm_mhz']} of {gpu['sm_max_mhz']} MHz")
    if gpu["power_w"] and gpu["power_limit_w"]:
        parts.append(f"{gpu['power_w']} of {gpu['power_limit_w']} W")
    parts += [f"{reason} {share:.0%} of the time" for reason, share in gpu["throttled"].items()]
    if gpu["other_processes"]:
        others = ", ".join(gpu["other_processes"][:3])
        parts.append(f"other processes: {others} ({gpu['busy_for_other_processes']:.0%})")
    return "; ".join(parts)


def _calls_line(calls: Mapping[str, Any]) -> str:
    parts = []
    for name, words in _CALL_WORDS.items():
        if name in calls and calls[name]["per_second"] >= 0.05:
            rate = calls[name]["per_second"]
            about = "about " if calls[name]["is_estimate"] else ""
            parts.append(f"{about}{rate:,.0f} {words}" if rate >= 10 else f"{about}{rate:.1f} {words}")
    return f"{', '.join(parts)} a second" if parts else ""
