"""The interface of a scheduler: labels of a process, and the GPUs that it gave to jobs on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Labels = Mapping[str, str]
"""Labels of events/owner.py."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
RAY_JOB = "RAY_JOB_ID"
HINTS = ("ECS_CONTAINER_METADATA_URI_V4", RAY_JOB, *VISIBLE)
"""Variables of a process's environment that a source needs, or that name its GPU."""


@dataclass(frozen=True)
class Allocation:
    """GPUs that a job or a pod holds on this machine.

    key: a label and its value, which the processes of the holder have. gpus: numbers or UUIDs, as the scheduler names
    them. since_ns: wall time of the start; 0 unknown.
    """

    key: tuple[str, str]
    owner: Labels
    gpus: tuple[str, ...]
    since_ns: int = 0


class Source(Protocol):
    """One scheduler. refresh() runs in a thread of its own; the other methods are quick, and use its last result."""

    name: str
    every_s: float

    def refresh(self) -> None:
        """Read the present state. Raises OSError, ValueError if the scheduler does not answer."""

    def labels(self, known: Labels, hints: Labels) -> Labels:
        """Further labels of a process with these known labels; these labels have priority.

        hints: of hints.py.
        """

    def allocations(self) -> Sequence[Allocation]:
        """The GPUs in use by jobs."""
