"""Compares the report on single-process jobs with the jobs' own measurements, py-spy's and torch.profiler's."""

import re
from pathlib import Path
from typing import Any

CLOSE = 0.1
_MAIN = re.compile(r"^(main|measured) \(.*_jobs\.py:\d+\)$")
_WORK = ("Base.", "RunAhead.", "__call__", "work (")


def judged(measured: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """How right the report is on a job."""
    if "pid" not in measured:
        return measured | {"right": None}
    pid, causes, function = measured["pid"], measured["causes"], measured["function"]
    verdicts = [verdict for verdict in report["verdicts"] if verdict["evidence"].get("pid") == pid]
    fault = next((verdict for verdict in verdicts if verdict["kind"] == "process"), None)
    first = fault["causes"][0] if fault else None
    line = first["evidence"].get("line", "") if first else ""
    is_right = (first is not None and first["cause"] in causes) if causes else fault is None
    return measured | {
        "summary": verdicts[0]["summary"] if verdicts else "healthy",
        "cause": first["cause"] if first else None,
        "others": [cause["cause"] for cause in fault["causes"][1:]] if fault else [],
        "line": line,
        "reported_share": first["share"] if first else None,
        "activity": next((process for process in report["activity"] if process["pid"] == pid), None),
        "right": is_right,
        "line_right": is_right and (not causes or not function or function in line),
    }


def is_close(row: dict[str, Any]) -> bool:
    """Whether the reported share is within 10 points of the job's own measurement."""
    return abs((row["reported_share"] or 0) - row["share"]) <= CLOSE


def stack_share(path: Path) -> float | None:
    """The share of py-spy's samples of the main thread that lie in the fault's function, not in the job's own work.

    path: py-spy's raw format, a line for each stack: "frame;frame;frame count", outermost first.
    """
    if not path.exists():
        return None
    n_main = n_fault = 0
    for line in path.read_text(errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        at = max((i for i, frame in enumerate(frames) if _MAIN.match(frame)), default=None)
        if at is None or not count.isdigit():
            continue
        n_main += int(count)
        below = frames[at + 1] if at + 1 < len(frames) else ""
        n_fault += int(count) * bool(below and not below.startswith(_WORK))
    return round(n_fault / n_main, 3) if n_main else None


def agreement(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many shares py-spy and torch.profiler confirm to 10 points: of named faults, and of busy GPUs."""
    by_spy = [
        abs(row["reported_share"] - row["py_spy_share"])
        for row in rows
        if row["causes"] and row["reported_share"] is not None and row.get("py_spy_share") is not None
    ]
    by_profiler = [
        abs(busy - row["profiler_gpu_busy"])
        for row in rows
        if row.get("profiler_gpu_busy") is not None
        and (busy := (row["activity"] or {}).get("gpu_busy")) is not None
    ]
    return {
        "n_with_py_spy": len(by_spy),
        "n_within_10_points_of_py_spy": sum(distance <= CLOSE for distance in by_spy),
        "n_with_profiler": len(by_profiler),
        "n_gpu_busy_within_10_points_of_profiler": sum(distance <= CLOSE for distance in by_profiler),
    }


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all jobs that ran, and for each job the answers of the tools."""
    known = [row for row in rows if row.get("right") is not None]
    faulty = [row for row in known if row["causes"]]
    healthy = [row for row in known if not row["causes"]]
    return {
        "n_faults": len(faulty),
        "n_causes_right": sum(row["right"] for row in faulty),
        "n_lines_right": sum(row["line_right"] for row in faulty),
        "n_shares_within_10_points": sum(row["right"] and is_close(row) for row in faulty),
        **agreement(known),
        "n_healthy": len(healthy),
        "n_healthy_accused": sum(not row["right"] for row in healthy),
        "not_run": [row["name"] for row in rows if row.get("right") is None],
        "jobs": [
            {
                "job": row["name"],
                "cause": row["cause"],
                "is_cause_right": row["right"],
                "is_line_right": row["line_right"],
                "job_share": row["share"],
                "reported_share": row["reported_share"],
                "py_spy_share": row.get("py_spy_share"),
                "gpu_busy": (row["activity"] or {}).get("gpu_busy"),
                "profiler_gpu_busy": row.get("profiler_gpu_busy"),
            }
            for row in known
        ],
    }


def _short(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _yes(is_right: bool) -> str:
    return "yes" if is_right else "NO"


def table(rows: list[dict[str, Any]]) -> str:
    """The answers in short lines, and their sums last."""
    lines = [
        f"{'job':<20}{'right':<6}{'line':<5}{'own':>5}{'ours':>5}{'spy':>5}{'busy':>5}{'prof':>5}{'n':>5}  cause"
    ]
    for row in rows:
        if row.get("right") is None:
            lines.append(f"{row['name']:<20}{'-':<6}{row.get('failed') or row.get('skipped', '')}"[:130])
            continue
        activity = row["activity"] or {}
        shares = [
            row["share"],
            row["reported_share"],
            row.get("py_spy_share"),
            activity.get("gpu_busy"),
            row.get("profiler_gpu_busy"),
        ]
        lines.append(
            f"{row['name']:<20}{_yes(row['right']):<6}{_yes(row['line_right']):<5}"
            f"{''.join(f'{_short(share):>5}' for share in shares)}{activity.get('n_samples', 0):>5}"
            f"  {row['cause'] or row['summary'][:60]} {row['line'][-40:]}"
        )
    known = [row for row in rows if row.get("right") is not None]
    faulty = [row for row in known if not row["name"].startswith("healthy")]
    healthy = [row for row in known if row["name"].startswith("healthy")]
    lines.append(
        f"faults: cause right {sum(row['right'] for row in faulty)} of {len(faulty)}, with the line "
        f"{sum(row['line_right'] for row in faulty)}, share within 10 points "
        f"{sum(row['right'] and is_close(row) for row in faulty)}; healthy: "
        f"{sum(not row['right'] for row in healthy)} of {len(healthy)} accused; not run {len(rows) - len(known)}"
    )
    return "\n".join(lines)
