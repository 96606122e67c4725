"""The task of a container in ECS, from the metadata endpoint (version 4) that ECS names in the container's environment.

The address is chosen by the environment of a traced process, so only the address of the ECS agent is accepted:
http://169.254.170.2/v4/ID (ECS developer guide, "Task metadata endpoint version 4").
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from stallscope.capture.owners.source import Allocation, Labels
from stallscope.capture.process.cloud import fetched

VARIABLE = "ECS_CONTAINER_METADATA_URI_V4"
_ADDRESS = re.compile(r"http://169\.254\.170\.2/v4/[0-9a-zA-Z-]{1,128}")
_TIMEOUT_S = 1.0
_MAX_BYTES = 256 << 10
_MAX_TASKS = 256


class Ecs:
    """Asks for each new address once. answer: gets the text at an address; raises OSError."""

    name = "ECS"

    def __init__(self, answer: Any = None, every_s: float = 5.0):
        self.every_s = every_s
        self._answer = answer or _get
        self._wanted: set[str] = set()
        self._labels: dict[str, dict[str, str]] = {}

    def refresh(self) -> None:
        """See Source."""
        failure: Exception | None = None
        for address in list(self._wanted - self._labels.keys()):
            try:
                self._labels[address] = labels_of(json.loads(self._answer(f"{address}/task")))
            except (OSError, ValueError) as error:
                self._wanted.discard(address)  # labels() adds it again while a process uses it
                failure = error
        if failure:
            raise failure

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """See Source."""
        address = hints.get(VARIABLE, "")
        if not _ADDRESS.fullmatch(address):
            return {}
        if len(self._wanted) < _MAX_TASKS:
            self._wanted.add(address)
        return self._labels.get(address, {})

    def allocations(self) -> list[Allocation]:
        """ECS does not report GPUs here."""
        return []


def labels_of(task: Mapping[str, Any]) -> dict[str, str]:
    """The labels of a task, from the answer of the endpoint."""
    arn = str(task.get("TaskARN") or "")
    found = {
        "task": arn.rpartition("/")[2],
        "workload_kind": "ECS task",
        "workload": str(task.get("Family") or ""),
        "account": arn.split(":")[4] if arn.count(":") >= 5 else "",
        "queue": str(task.get("ServiceName") or ""),
    }
    return {label: value for label, value in found.items() if value}


def _get(address: str) -> str:
    return fetched(address, {}, timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES).decode()
