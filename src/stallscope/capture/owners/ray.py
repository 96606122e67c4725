"""Jobs and actors of one Ray cluster, from the dashboard of its head node.

Formats: Ray 2.53. Jobs are the JobDetails of /api/jobs/, nodes and actors the NodeState and ActorState of the state API
(/api/v0), which Ray calls alpha. An actor is identified by the job, its node's address and its process number there. A
worker that Ray starts in advance has no job in its environment: its job is the job of its actor.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from stallscope.capture.owners.hints import ADDRESSES, OWN_PID
from stallscope.capture.owners.source import RAY_JOB, Allocation, Labels
from stallscope.credentials import from_environment

DASHBOARD = "http://127.0.0.1:8265"
_ALIVE = "&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
_JOBS = "/api/jobs/"
_NODES = "/api/v0/nodes?limit=10000"
_ACTORS = f"/api/v0/actors?limit=10000{_ALIVE}"
"""10,000 rows are the most that Ray returns; actors beyond have no name here."""
_TIMEOUT_S = 10.0
_MAX_BYTES = 32 << 20

Actors = Mapping[tuple[str, str], list[tuple[str, str]]]
"""(address of the node, process number) -> (job, name) of each live actor."""

NO_JOB = "ffffffff"
"""JobID.nil() in hexadecimal digits (JobID of src/ray/common/id.h has 4 bytes)."""


class Ray:
    """address: of the dashboard. answer: gets the text at a URL; raises OSError."""

    name = "Ray"

    def __init__(
        self, address: str = "", answer: Callable[[str], str] | None = None, *, every_s: float = 30.0
    ):
        self.every_s = every_s
        self._address, self._answer = (address or DASHBOARD).rstrip("/"), answer or _get
        self._jobs: dict[str, str] = {}
        self._actors: Actors = {}

    def refresh(self) -> None:
        """See Source."""
        texts = [self._answer(f"{self._address}{path}") for path in (_JOBS, _NODES, _ACTORS)]
        try:
            self._jobs = job_names(json.loads(texts[0]))
            self._actors = actor_names(_rows(texts[1]), _rows(texts[2]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._address} does not answer in the format of Ray's dashboard") from error

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """See Source. A job of Slurm in which Ray runs keeps its own name."""
        job, name = self._actor(hints)
        is_new = hints.get(RAY_JOB) == NO_JOB != job and not known.get("job")
        labels = {
            "job": job if is_new else "",
            "job_name": self._jobs.get(job, "") if is_new or known.get("job") == job else "",
            "actor": name,
        }
        return {label: value for label, value in labels.items() if value}

    def _actor(self, hints: Labels) -> tuple[str, str]:
        """Job and name of the only actor that a worker may be; otherwise the job of its environment."""
        job = hints.get(RAY_JOB, "")
        addresses = hints.get(ADDRESSES, "").split(",")
        actors = [
            actor
            for address in addresses
            for actor in self._actors.get((address, hints.get(OWN_PID, "")), ())
            if job in (NO_JOB, actor[0])
        ]
        return actors[0] if len(actors) == 1 else (job, "")

    def allocations(self) -> list[Allocation]:
        """Ray does not report the GPUs of a job."""
        return []


def job_names(jobs: list[dict[str, Any]]) -> dict[str, str]:
    """Job id -> the name in its metadata, otherwise its submission id."""
    names = {
        str(job.get("job_id") or ""): str(
            (job.get("metadata") or {}).get("job_name") or job.get("submission_id") or ""
        )
        for job in jobs
    }
    return {job: name for job, name in names.items() if job and name}


def actor_names(nodes: list[dict[str, Any]], actors: list[dict[str, Any]]) -> Actors:
    """The jobs and names of live actors, or their classes."""
    address = {node.get("node_id"): str(node.get("node_ip") or "") for node in nodes}
    names: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for actor in actors:
        key = address.get(actor.get("node_id"), ""), str(actor.get("pid"))
        name = str(actor.get("name") or actor.get("repr_name") or actor.get("class_name") or "")
        if actor.get("state") == "ALIVE" and key[0]:
            names.setdefault(key, []).append((str(actor.get("job_id")), name))
    return names


def _rows(text: str) -> list[dict[str, Any]]:
    """The rows of an answer of the state API. Raises OSError, ValueError."""
    answer = json.loads(text)
    if not answer.get("result"):
        raise OSError(f"the state API of Ray refuses: {str(answer.get('msg'))[:200]}")
    rows: list[dict[str, Any]] = answer["data"]["result"]["result"]
    return rows


def _get(url: str) -> str:
    """Raises OSError."""
    from stallscope.capture.process.cloud import fetched

    token = from_environment("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return fetched(url, headers, timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise OSError(f"{url.partition('?')[0]} does not answer ({error or type(error).__name__})") from error
