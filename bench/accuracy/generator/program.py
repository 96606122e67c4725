"""Instructions of a rank's host, and the builder that writes programs with their scatter already drawn.

A program is a list of steps; a step is a list of instructions (tuples, for speed). The faults change programs, so a
job and its twin without the fault scatter equally.
"""

from typing import NamedTuple

from stallscope.events.names import Category, Datatype, Op


class Host(NamedTuple):
    """The host is in one category for ns. calls: synchronise, allocation, copy calls made in that time.

    drains: the call first waits for the rank's own GPU, as cudaFree does.
    """

    category: int
    ns: int
    calls: tuple[int, int, int] = (0, 0, 0)
    drains: bool = False


class Kernel(NamedTuple):
    """Launches of kernels on a stream: gpu_ns on the GPU, host_ns on the host."""

    gpu_ns: int
    launches: int
    host_ns: int
    stream: int = 0


class Collective(NamedTuple):
    """A collective on a group; peer: the other member of a send or receive, or the root."""

    group: int
    op: Op
    count: int
    gpu_ns: int
    host_ns: int
    datatype: Datatype = Datatype.BFLOAT16
    is_backward: bool = False
    peer: int = -1


class Join(NamedTuple):
    """The compute stream waits for the stream of a group."""

    group: int


class Sync(NamedTuple):
    """The host waits for its GPU: for all streams, or for the compute stream only. leave_ns: time to wake up."""

    leave_ns: int
    copies: int = 1
    is_compute_only: bool = False


class Mark(NamedTuple):
    """The job annotates the start of a step."""

    step: int


class Stop(NamedTuple):
    """The host never continues. is_dead: its process ends."""

    category: int
    is_dead: bool = False


Instruction = Host | Kernel | Collective | Join | Sync | Mark | Stop
Step = list[Instruction]
Program = list[Step]

OFF_CPU = frozenset(
    {
        *(Category.LOCK, Category.OTHER_OFF, Category.SLEEP, Category.NET, Category.CHILD, Category.STOPPED),
        *(Category.PREEMPTED, Category.FAULT, Category.DRIVER, Category.IO),
    }
)
"""Categories in which a thread is off the CPU, outside CUDA calls."""
