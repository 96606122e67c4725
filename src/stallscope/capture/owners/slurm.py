"""Jobs of Slurm on this machine, with the GPUs that they hold: from scontrol, or from slurmrestd.

scontrol prints JSON if it was built with it (from 21.08), otherwise text. The format of the JSON changes with the
version: a number is plain, or an object with `number`; a state is a text, or a list. The components of a heterogeneous
job have numbers of their own; its processes and users know the number of the whole job (SLURM_JOB_ID).
"""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stallscope.capture.owners.source import Allocation, Labels
from stallscope.credentials import from_environment

_TIMEOUT_S = 20.0
_MAX_BYTES = 256 << 20
_SHOW = ("scontrol", "show", "jobs", "--details", "--oneliner")
_HEAD = re.compile(
    r"JobId=(?P<number>\d+) (?:ArrayJobId=\d+ ArrayTaskId=(?P<array_task>\S+) (?:ArrayTaskThrottle=\d+ )?)?"
    r"(?:HetJobId=(?P<whole>\d+) HetJobOffset=\d+ )?JobName=(?P<job_name>.*?) (?:HetJobIdSet=\S+ )?"
    r"UserId=(?P<user>[^\s(]+)\(\d+\) GroupId=\S+ MCS_label=\S+ "
    r"Priority=\d+ Nice=-?\d+ Account=(?P<account>\S+) QOS=(?P<qos>\S+) (?:WCKey=\S+ )?JobState=(?P<state>\S+)"
)
"""The order of slurm_sprint_job_info in src/api/job_info.c; a job name may contain blanks."""
_ON_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=(\S*)")
_GPUS = re.compile(r"gpu(?::[^:(,\s]+)?:(\d+)(?:\(IDX:([\d,-]+)\))?")
_GPUS_IN_ALL = re.compile(r"\bgres/gpu=(\d+)")
_RANGES = re.compile(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*),?")
_LABELS = ("job", "array_task", "job_name", "user", "account", "partition", "qos", "node_list")


@dataclass(frozen=True)
class _Job:
    """A job on this machine. number: of a component of a heterogeneous job; otherwise as labels["job"]."""

    number: str
    labels: dict[str, str]
    gpus: tuple[str, ...]
    since_ns: int


class Slurm:
    """node: this machine's name in Slurm. address: of slurmrestd's jobs, with SLURM_JWT as token; empty: scontrol."""

    name = "Slurm"

    def __init__(self, node: str, *, address: str = "", every_s: float = 30.0):
        self.every_s = every_s
        self._node, self._address = node, address
        self._jobs: dict[str, _Job] = {}
        self._numbers: dict[str, str] = {}
        self._has_json = True

    def refresh(self) -> None:
        """See Source."""
        found = list(self._read())
        self._jobs = _whole_jobs(found)
        self._numbers = {job.number: job.labels["job"] for job in found}

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """See Source. Control groups name the component of a heterogeneous job, the environment the whole job."""
        number = known.get("job", "")
        job = self._jobs.get(number) or self._jobs.get(self._numbers.get(number, ""))
        if job is None:
            return {}
        return job.labels | ({"gpus": ",".join(job.gpus)} if job.gpus else {})

    def allocations(self) -> list[Allocation]:
        """See Source."""
        return [
            Allocation(("job", number), job.labels, job.gpus, job.since_ns)
            for number, job in self._jobs.items()
            if job.gpus
        ]

    def _read(self) -> list[_Job]:
        if self._address:
            return list(of_json(_rest(self._address), self._node))
        if self._has_json:
            answer = _run(*_SHOW[:3], "--json")
            if answer.startswith("{"):
                return list(of_json(answer, self._node))
            self._has_json = False
        return list(of_text(_run(*_SHOW), self._node))


def of_text(text: str, node: str) -> Iterator[_Job]:
    """The running jobs of a node, from `scontrol show jobs --details --oneliner`."""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is None or head["state"] != "RUNNING":
            continue
        rest = line[head.end() :]
        nodes = _value(rest, "NodeList")
        if _index(node, nodes) is None:
            continue
        gpus = [
            gpu
            for names, gres in _ON_NODES.findall(rest)
            if _index(node, names) is not None
            for gpu in _gpus(gres)
        ]
        start = _value(rest, "StartTime")
        since_ns = int(datetime.fromisoformat(start).timestamp()) * 10**9 if start[:1].isdigit() else 0
        labels = head.groupdict() | {
            "job": head["whole"] or head["number"],
            "partition": _value(rest, "Partition"),
            "node_list": nodes,
        }
        yield _Job(head["number"], _known(labels), tuple(gpus), since_ns)


def of_json(text: str, node: str) -> Iterator[_Job]:
    """The running jobs of a node, from the JSON of scontrol or slurmrestd. Raises ValueError, OSError."""
    answer = json.loads(text)
    jobs = answer.get("jobs") or ()
    if not jobs and (errors := answer.get("errors")):
        raise OSError(f"Slurm refuses the list of jobs: {_complaint(errors[0])}")
    for job in jobs:
        states, nodes = job.get("job_state"), job.get("nodes") or ""
        at = _index(node, nodes)
        states = set(states if isinstance(states, list) else [states])
        if "RUNNING" not in states or "CONFIGURING" in states or at is None:
            continue
        number = _text(job["job_id"])
        is_of_array = _number(job.get("array_job_id", 1))
        labels = {
            "job": str(_number(job.get("het_job_id")) or number),
            "array_task": _text(job.get("array_task_id")) if is_of_array else "",
            "job_name": job.get("name"),
            "user": job.get("user_name") or _text(job.get("user_id")),
            "node_list": nodes,
            **{name: job.get(name) for name in ("account", "partition", "qos")},
        }
        since_ns = int(_number(job.get("start_time")) or 0) * 10**9
        yield _Job(number, _known(labels), tuple(_json_gpus(job, at, nodes)), since_ns)


def _json_gpus(job: Mapping[str, Any], at: int, nodes: str) -> list[str]:
    """The GPUs on one node of a job. Without details, the number in the whole job is known only."""
    if detail := job.get("gres_detail"):
        return _gpus(detail[at]) if at < len(detail) else []
    match = _GPUS_IN_ALL.search(str(job.get("tres_alloc_str") or ""))
    return ["?"] * int(match[1]) if match and len(expanded(nodes)) == 1 else []


def _whole_jobs(found: Iterable[_Job]) -> dict[str, _Job]:
    """The jobs by the number that users know. Components of one job on this machine hold their GPUs together."""
    jobs: dict[str, _Job] = {}
    for job in found:
        number = job.labels["job"]
        other = jobs.get(number)
        jobs[number] = job if other is None else replace(other, gpus=other.gpus + job.gpus)
    return jobs


def _index(node: str, nodes: str) -> int | None:
    """The position of a node in a host list, by its whole name or its short name; None if it is not there."""
    names = expanded(nodes)
    return next((names.index(name) for name in (node, node.partition(".")[0]) if name in names), None)


def _complaint(error: Any) -> str:
    words = error.get("description") or error.get("error") if isinstance(error, dict) else error
    return str(words)[:200]


def expanded(nodes: str) -> list[str]:
    """The names of a host list: `n[01-03,7],gpu` gives n01, n02, n03, n7, gpu."""
    names = []
    for before, ranges, after in _RANGES.findall(nodes):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            if not last:
                names.append(f"{before}{first}{after}")
                continue
            width = len(first)
            names += [f"{before}{n:0{width}}{after}" for n in range(int(first), int(last) + 1)]
    return names


def _gpus(gres: str) -> list[str]:
    """The GPU numbers in `gpu:h100:4(IDX:0-2,5)`; without numbers, one `?` for each GPU."""
    out: list[str] = []
    for n, ranges in _GPUS.findall(gres):
        if not ranges:
            out += ["?"] * int(n)
        for part in ranges.split(",") if ranges else ():
            first, _, last = part.partition("-")
            out += [str(index) for index in range(int(first), int(last or first) + 1)]
    return out


def _value(text: str, key: str) -> str:
    match = re.search(rf"(?: |^){key}=(\S*)", text)
    return match[1] if match else ""


def _known(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(found[name]) for name in _LABELS if found.get(name) not in (None, "", "(null)", "N/A")}


def _number(value: Any) -> Any:
    return (value.get("number") if value.get("set", True) else None) if isinstance(value, dict) else value


def _text(value: Any) -> str:
    number = _number(value)
    return "" if number is None or number == 0xFFFFFFFE else str(number)


def _run(*command: str) -> str:
    """The output of a command. Raises OSError."""
    environ = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, errors="replace", env=environ
        )
    except FileNotFoundError:
        raise OSError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode and "--json" not in command:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise OSError(f"{' '.join(command[:3])}: {reason[:200]}")
    return done.stdout


def _rest(address: str) -> str:
    """Raises OSError."""
    from stallscope.capture.process.cloud import fetched

    headers = {"X-SLURM-USER-TOKEN": from_environment("SLURM_JWT")}
    return fetched(address, headers, timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES).decode(errors="replace")
