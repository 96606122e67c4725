"""Real Slurm on this machine: slurmctld, slurmd, and jobs of srun and salloc, next to the agent.

Checks that srun of the emulated job gives its name, user and account in the verdict, and that GPUs of an salloc without
a process are listed within 60 s. `make prove-slurm` installs Debian's packages and runs this once, as root; the result
goes to results/slurm.json. No munge: auth/none; no control groups: proctrack/linuxproc; GPUs are plain files.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from report import report

from stallscope.demo import live_demo

HELD_WITHIN_S = 60.0
JOB_S = 45.0
PORTS = (26817, 26818)
CONF = """
ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CryptoType=crypto/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=4000 Gres=gpu:8 State=UNKNOWN
PartitionName=train Nodes={host} Default=YES State=UP
"""


def main() -> None:
    """Run the proof, report, and fail if a check fails."""
    with (
        tempfile.TemporaryDirectory(prefix="stallscope-slurm-", dir="/var/tmp") as name,
        ExitStack() as stack,
    ):
        folder = Path(name)
        host = stack.enter_context(slurm(folder))
        stack.enter_context(agent(folder, host))
        held = held_gpus(folder)
        job = traced_job(folder)
        version = output("sinfo", "--version").strip()
    verdict = job["verdict"]
    owner = verdict.get("owner", {})
    is_right = (owner.get("job_name"), owner.get("account")) == ("train", "ml") and verdict["ranks"] == [2]
    is_right &= owner.get("user") == job["user"] and held["after_s"] <= HELD_WITHIN_S
    is_right &= not job["is_listed_as_idle"] and held["is_listed_after_scancel"] is False
    report("slurm", {"slurm": version, "held": held, "job": job, "is_right": is_right})
    sys.exit(not is_right)


@contextmanager
def slurm(folder: Path) -> Iterator[str]:
    """A controller and a node of Slurm. Yields the node's name."""
    host = os.uname().nodename.partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=PORTS))
    for number in range(8):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu[0-7]\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    with started("slurmctld", "-D"), started("slurmd", "-D", "-N", host):
        until(lambda: "idle" in output("sinfo", "-h", "-o", "%t"), 60.0)
        yield host


@contextmanager
def started(*command: str, stop: int = signal.SIGTERM, log: Path | None = None) -> Iterator[None]:
    """A process that is ended at the end of the block."""
    with (log or Path(os.devnull)).open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.send_signal(stop)
            process.wait(60)


@contextmanager
def agent(folder: Path, host: str) -> Iterator[None]:
    """`stallscope trace` with owners of Slurm."""
    os.environ |= {"STALLSCOPE_OWNERS": "slurm", "STALLSCOPE_IDLE_AFTER_S": "30"}
    command = (sys.executable, "-c", "from stallscope.cli import main; main()")
    log, options = folder / "agent.log", ("trace", "--db", str(folder / "trace.db"), "--node", host)
    with started(*command, *options, stop=signal.SIGINT, log=log):
        until(lambda: (folder / "trace.db").exists() and "tracing into" in log.read_text(), 60.0)
        yield


def held_gpus(folder: Path) -> dict[str, Any]:
    """An allocation of 4 GPUs without a process: the time until it is listed, its row, and its end."""
    begin_s = time.monotonic()
    subprocess.run(
        ["salloc", "--no-shell", "--gres=gpu:4", "-J", "forgotten", "-A", "ml"],
        check=True,
        capture_output=True,
    )
    until(lambda: listed(folder, "forgotten"), 120.0)
    after_s = time.monotonic() - begin_s
    row = listed(folder, "forgotten")[0]
    subprocess.run(["scancel", row["owner"]["job"]], check=True)
    until(lambda: not listed(folder, "forgotten"), 120.0)
    return {
        "after_s": round(after_s, 1),
        "row": row,
        "is_listed_after_scancel": bool(listed(folder, "forgotten")),
    }


def traced_job(folder: Path) -> dict[str, Any]:
    """srun of the emulated job, in which rank 2 is late: its verdict, and whether its GPUs are ever listed as idle."""
    plan = live_demo.plan_for("disk", ranks=4, seconds=JOB_S)
    job_folder = folder / "job"
    job_folder.mkdir()
    plan.write(job_folder)
    script = f'yes go | exec {sys.executable} -m stallscope.demo.job {job_folder} "$SLURM_PROCID"'
    command = ["srun", "-n", "4", "--gres=gpu:4", "-J", "train", "-A", "ml", "sh", "-c", script]
    is_listed = False
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        while job.poll() is None:
            is_listed |= bool(listed(folder, "train"))
            time.sleep(2)
    answer = output(
        sys.executable,
        "-c",
        "from stallscope.cli import main; main()",
        "explain",
        "--json",
        "--db",
        str(folder / "trace.db"),
    )
    verdicts = [each for each in json.loads(answer)["verdicts"] if each["kind"] == "straggler"]
    verdict = verdicts[0] if verdicts else {"ranks": [], "owner": {}}
    user = output("id", "-un").strip()
    kept = {name: verdict.get(name) for name in ("summary", "ranks", "owner")}
    return {"verdict": kept, "user": user, "is_listed_as_idle": is_listed}


def listed(folder: Path, job_name: str) -> list[dict[str, Any]]:
    """The rows of `stallscope idle --json` of a job."""
    command = (sys.executable, "-c", "from stallscope.cli import main; main()", "idle", "--json")
    rows = json.loads(output(*command, "--db", str(folder / "trace.db")) or "[]")
    return [row for row in rows if row["owner"].get("job_name") == job_name]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def until(is_so: Callable[[], object], patience_s: float) -> None:
    """Wait. Raises TimeoutError."""
    end_s = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError("a condition of the proof did not become true")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
