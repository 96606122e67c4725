"""Whether a process belongs to a group of processes that wait for each other, by its environment and command line.

A process that waits for such a peer (at a rendezvous, in a barrier of Gloo or MPI) is quiet without being idle.
"""

import re
from collections.abc import Mapping

_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PALS_SIZE",
    "PMIX_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "PET_NNODES",
    "LWS_GROUP_SIZE",
)
"""Set by torchrun, MPI, srun, Kubeflow and LeaderWorkerSet. SLURM_NTASKS is left out: it also is in the environment of
the only process of an allocation."""

_NODES = re.compile(rb"--?nnodes[=\0]([^\0]+)")
"""The option of torchrun and of launchers that copy it: a number, or a range."""


def group_size(variables: Mapping[str, str]) -> int:
    """The number of processes or machines of the group; 1 without a group."""
    return max(map(_largest, (variables.get(name, "") for name in _SIZES)))


def has_peers(variables: Mapping[str, str], command: bytes = b"") -> bool:
    """command: the command line, separated by zero bytes."""
    nodes = _NODES.search(command)
    return group_size(variables) > 1 or (
        nodes is not None and _largest(nodes[1].decode("ascii", "replace")) > 1
    )


def _largest(text: str) -> int:
    """The upper end of `4` or `2:4`; 1 for another text."""
    number = text.rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 8 else 1
