"""Single-process jobs on one GPU, traced by one agent, against each job's own measurement.

    bench/gpu/run_there.sh single --budget 520

The jobs run one after the other; the next job imports PyTorch while a job runs. In OUT: single.json (all answers),
single.db.gz (the trace) and single.txt (the table, which is printed last). Right: the first cause and the line of
code are right, and no fault is named for a healthy job. Shares are compared with the job's own.
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from running import STALLSCOPE

HERE = Path(__file__).parent
SECONDS = 6.0
JOB_S = 45.0
EXPLAIN_S = 60.0


def start(name: str, folder: Path) -> "subprocess.Popen[str]":
    """A job at its gate."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "single_jobs.py"), name, str(SECONDS), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / f"{name}.err").open("w"),
        text=True,
    )


def run(name: str, job: "subprocess.Popen[str]", folder: Path) -> dict[str, Any]:
    """Let a job run, and read its measurements."""
    assert job.stdin and job.stdout
    watchdog = subprocess.Popen(["sh", "-c", f"sleep {JOB_S}; kill -9 -{job.pid}"], start_new_session=True)
    try:
        job.stdout.readline()
        job.stdin.write("go\n")
        job.stdin.flush()
        line = job.stdout.readline()
        job.wait(timeout=10)
    finally:
        watchdog.kill()
        job.kill()
    if not line.strip():
        words = (folder / f"{name}.err").read_text(errors="replace").strip().splitlines()
        return {"name": name, "failed": words[-1][:200] if words else "it printed nothing"}
    found: dict[str, Any] = json.loads(line)
    return found


def judged(name: str, measured: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """How right the report is on a job."""
    import single_jobs

    _, causes, function = single_jobs.JOBS[name]
    if "pid" not in measured:
        return measured | {"right": None}
    pid = measured["pid"]
    activity = next((one for one in report["activity"] if one["pid"] == pid), None)
    verdicts = [one for one in report["verdicts"] if one["evidence"].get("pid") == pid]
    named = next((one for one in verdicts if one["kind"] == "process"), None)
    first = named["causes"][0] if named else None
    out = measured | {
        "summary": verdicts[0]["summary"] if verdicts else "healthy",
        "cause": first["cause"] if first else None,
        "others": [one["cause"] for one in named["causes"][1:]] if named else [],
        "line": first["evidence"].get("line", "") if first else "",
        "reported_share": first["share"] if first else None,
        "activity": activity,
    }
    if not causes:
        return out | {"right": named is None, "line_right": True}
    is_right = first is not None and first["cause"] in causes
    return out | {"right": is_right, "line_right": is_right and (not function or function in out["line"])}


def _short(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _yes(is_right: bool) -> str:
    return "yes" if is_right else "NO"


def table(rows: list[dict[str, Any]]) -> str:
    """The answers in short lines, and their sums last."""
    lines = [f"{'job':<20}{'right':<7}{'line':<6}{'own':>5}{'ours':>6}{'busy':>6}{'n':>5}  cause, line"]
    for row in rows:
        if row.get("right") is None:
            lines.append(f"{row['name']:<20}{'-':<7}{row.get('failed') or row.get('skipped', '')}"[:130])
            continue
        activity = row["activity"] or {}
        busy, share = _short(activity.get("gpu_busy")), _short(row["reported_share"])
        lines.append(
            f"{row['name']:<20}{_yes(row['right']):<7}{_yes(row['line_right']):<6}"
            f"{row['share']:>5.2f}{share:>6}{busy:>6}"
            f"{activity.get('n_samples', 0):>5}  {row['cause'] or row['summary'][:60]} {row['line'][-50:]}"
        )
    known = [row for row in rows if row.get("right") is not None]
    faulty = [row for row in known if not row["name"].startswith("healthy")]
    healthy = [row for row in known if row["name"].startswith("healthy")]
    close = [
        row for row in faulty if row["right"] and abs((row["reported_share"] or 0) - row["share"]) <= 0.1
    ]
    lines.append(
        f"faults: cause right {sum(row['right'] for row in faulty)} of {len(faulty)}, with the line "
        f"{sum(row['line_right'] for row in faulty)}, share within 10 points {len(close)}; healthy: "
        f"{sum(not row['right'] for row in healthy)} of {len(healthy)} accused; not run {len(rows) - len(known)}"
    )
    return "\n".join(lines)


def main() -> None:
    """Run all, explain, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=520)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    end_s = time.monotonic() + chosen.budget
    chosen.out.mkdir(parents=True, exist_ok=True)
    import single_jobs

    names = [name for name in single_jobs.JOBS if not chosen.only or name in chosen.only]
    # Healthy jobs among the others, so that a short budget leaves some of both.
    healthy = [name for name in names if name.startswith("healthy")]
    faulty = [name for name in names if not name.startswith("healthy")]
    order = []
    for i, name in enumerate(faulty):
        order.append(name)
        if i % 4 == 3 and healthy:
            order.append(healthy.pop(0))
    order += healthy
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="single-", ignore_cleanup_errors=True) as work:
        folder = Path(work)
        db = folder / "single.db"
        agent = subprocess.Popen(
            [*STALLSCOPE, "trace", "--db", str(db)], stderr=(chosen.out / "agent.txt").open("w")
        )
        measured: dict[str, dict[str, Any]] = {}
        following = start(order[0], folder)
        time.sleep(3)
        for i, name in enumerate(order):
            job = following
            if end_s - time.monotonic() < EXPLAIN_S + SECONDS + 8:
                measured[name] = {"name": name, "skipped": "no time left"}
                continue
            following = start(order[i + 1], folder) if i + 1 < len(order) else job
            begin_s = time.monotonic()
            try:
                measured[name] = run(name, job, folder)
            except Exception as error:  # noqa: BLE001 - one job's failure must not cost the others
                measured[name] = {"name": name, "failed": f"{type(error).__name__}: {error}"[:200]}
            print(f"{name} {time.monotonic() - begin_s:.1f} s {measured[name]}"[:160], flush=True)
        following.kill()
        agent.terminate()
        agent.wait(timeout=60)
        done = subprocess.run(
            [*STALLSCOPE, "explain", str(db), "--json"], capture_output=True, text=True, timeout=120
        )
        with db.open("rb") as source, gzip.open(chosen.out / "single.db.gz", "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            sys.exit(f"explain failed: {done.stderr[-800:]}")
        rows = [judged(name, measured[name], report) for name in order]
        (chosen.out / "single.json").write_text(json.dumps({"jobs": rows}, indent=1))
        words = table(rows)
        (chosen.out / "single.txt").write_text(words + "\n")
        print(words, flush=True)


if __name__ == "__main__":
    main()
