"""Runs inside a virtual machine as a unit of systemd: the units of the package, as an administrator uses them.

boot.py agent: the agent traces an emulated job; boot.py hub: the hub answers. Prints the word RESULT and a line of JSON
on the console, then ends the machine.
"""

import json
import os
import pwd
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(1, "/usr/lib/stallscope/packages")

from stallscope.errors import StallscopeError

AGENT, HUB = "/usr/bin/stallscope", "/usr/local/bin/stallscope"
TRACE = Path("/var/lib/stallscope/trace.db")
FOLDER, FILES = Path("/var/lib/stallscope/hub"), Path("/etc/stallscope")
PATIENCE_S = 900


def main() -> None:
    """Print the measurements, or the error and the journal."""
    result: dict[str, Any] = {}
    try:
        {"agent": _try_agent, "hub": _try_hub}[sys.argv[1]](result)
    except (OSError, RuntimeError, StallscopeError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
        result["journal"] = _output("journalctl", "-n", "60", "--no-pager", "-o", "cat")
    print("RESULT", json.dumps(result), flush=True)
    subprocess.run(["systemctl", "poweroff", "--force", "--force"], check=False)


def _try_agent(result: dict[str, Any]) -> None:
    _at("the agent starts with the settings of its package")
    _run("systemctl", "enable", "--now", "stallscope-agent")
    _wait(lambda: b"tracing into" in _log("stallscope-agent"), "the agent does not trace")
    result["unit"] = _unit("stallscope-agent")
    _at("a job runs")
    _job()
    _at("the agent writes the rows of the job")
    _wait(lambda: _n_collectives() > 0, "the trace has no collectives")
    result["collectives"] = _n_collectives()
    _at("the agent is killed, and systemd starts it again")
    before = _pid("stallscope-agent")
    os.kill(before, signal.SIGKILL)
    _wait(lambda: _pid("stallscope-agent") not in (0, before), "the agent is not started again")
    _end("stallscope-agent", result)
    explained = subprocess.run([AGENT, "explain"], capture_output=True, text=True)
    result["explain"] = [explained.returncode, explained.stdout[:1500], explained.stderr[:300]]


def _try_hub(result: dict[str, Any]) -> None:
    _at("the hub is prepared, as the head of its unit describes")
    _prepare_hub()
    _run("systemctl", "start", "stallscope-hub")
    _wait(lambda: b"ready" in _log("stallscope-hub"), "the hub is not ready")
    result["unit"] = _unit("stallscope-hub")
    words = ["--token-file", f"{FILES}/read.token", "--ca-cert", f"{FILES}/hub.crt", "--json"]
    asked = subprocess.run([HUB, "ask", "verdicts", *words], capture_output=True, text=True)
    result["ask"] = [asked.returncode, asked.stdout[:300], asked.stderr[:300]]
    _end("stallscope-hub", result)


def _end(unit: str, result: dict[str, Any]) -> None:
    _at(f"{unit} ends")
    _run("systemctl", "stop", unit)
    result["result"] = _property(unit, "Result")


def _prepare_hub() -> None:
    user = pwd.getpwnam("stallscope")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    FOLDER.parent.mkdir(exist_ok=True)
    _run(HUB, "hub", "quickstart", "--db", str(FOLDER), "--name", "localhost")
    _run("install", "-m", "640", "-g", "stallscope", f"{FOLDER}/tls/hub.key", f"{FILES}/hub.key")
    _run("install", "-m", "644", f"{FOLDER}/tls/hub.crt", f"{FILES}/hub.crt")
    _run("install", "-m", "600", f"{FOLDER}/read.token", f"{FILES}/read.token")
    _run("chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(FOLDER))


def _job() -> None:
    """Run four ranks of which rank 2 sleeps every 14 steps, after the agent has attached."""
    from stallscope.demo import live_demo

    with live_demo.started(live_demo.plan_for("sleep", ranks=4, seconds=30)) as job:
        _wait(lambda: _log("stallscope-agent").count(b"attached to") >= 2, "the agent does not attach")
        job.go()
        job.wait(PATIENCE_S)


def _n_collectives() -> int:
    """Rows in the agent's trace: on an emulated CPU, the agent reads the records long after the job has made them."""
    with closing(sqlite3.connect(f"file:{TRACE}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM collectives").fetchone()[0])


def _unit(name: str) -> Mapping[str, Any]:
    """The state of a running unit, by systemd and by the kernel."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{_pid(name)}/status").read_text().splitlines()
        if ":\t" in line
    )
    exposure = _output("systemd-analyze", "security", "--no-pager", name).splitlines()[-1]
    return {
        "state": _property(name, "ActiveState"),
        "user": pwd.getpwuid(int(status["Uid"].split()[0])).pw_name,
        **{key: status[key] for key in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp")},
        "exposure": exposure,
    }


def _pid(unit: str) -> int:
    return int(_property(unit, "MainPID") or 0)


def _property(unit: str, name: str) -> str:
    return _output("systemctl", "show", unit, "--property", name, "--value")


def _log(unit: str) -> bytes:
    return _output("journalctl", "-u", unit, "-o", "cat", "--no-pager").encode()


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stderr.strip()[-500:]}")


def _wait(is_true: Callable[[], bool], complaint: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError(complaint)
        time.sleep(2)


def _at(stage: str) -> None:
    print(f"at {time.monotonic():.1f} s: {stage}", flush=True)


if __name__ == "__main__":
    main()
