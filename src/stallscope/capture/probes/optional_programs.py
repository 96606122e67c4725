"""BPF programs that a kernel may lack: each feature is reported if the kernel supports it, and listed as missing

otherwise.

Support is found by trying: if the kernel refuses a program, the next way to provide the same feature is tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Feature(NamedTuple):
    """A kind of event of the machine. ways: sets of programs that provide it, best set first."""

    meaning: str
    ways: tuple[tuple[str, ...], ...]


SERVING = ("serving_tick", "serving_read", "serving_sent", "serving_state", "serving_arrival")
"""Programs that are attached once an inference engine runs."""

FEATURES = (
    Feature("processes that begin", (("host_fork",),)),
    Feature("processes that become other programs", (("host_exec",),)),
    Feature("processes that end, and how", (("host_exit",),)),
    Feature("signals and who sends them", (("host_signal",),)),
    Feature("moves to other CPUs", (("host_migrate",),)),
    Feature("victims of the out-of-memory killer", (("host_victim",), ("host_victim_6_8",))),
    Feature("reclaim of memory", (("host_reclaim_begin", "host_reclaim_end"),)),
    Feature(
        "reclaim of memory for a control group", (("host_group_reclaim_begin", "host_group_reclaim_end"),)
    ),
    Feature("compaction of memory", (("host_compaction_begin", "host_compaction_end"),)),
    Feature(
        "requests to disks", (("block_start", "block_done"), ("block_issue", "block_complete"))
    ),  # block_io_start: from 6.5 on
    Feature("TCP retransmits", (("tcp_resent",),)),
    Feature("native frames of threads that hang", (("peek",),)),
    Feature("requests of inference engines", (SERVING,)),  # these tracepoints: from 6.3 on
)
IOCTL_WAYS = {
    # Attaches to the system call's own function: other system calls pay nothing.
    "function": ("ioctl_enter", "ioctl_leave"),
    "tracepoint": ("ioctl_enter_any", "ioctl_leave_any"),
}
"""Ways to see calls into the GPU driver, best first."""

ASKED = ("peek", *SERVING)
"""Programs that are not attached at the start: `peek` runs on request."""


def driver_calls(ways: Iterable[str]) -> Feature:
    """Calls into the GPU driver, only if requested. ways: of IOCTL_WAYS, to be tried in order."""
    return Feature("calls into the GPU driver", tuple(IOCTL_WAYS[way] for way in ways))


@dataclass
class Optional:
    """The way that each feature uses now; a feature without a remaining way is missing. features: the wanted
    features.
    """

    features: tuple[Feature, ...] = FEATURES
    _way: dict[Feature, int] = field(init=False)

    def __post_init__(self) -> None:
        self._way = dict.fromkeys(self.features, 0)

    def programs(self) -> list[str]:
        """The programs to load."""
        return [name for feature in self.features for way in self._ways(feature)[:1] for name in way]

    def give_up(self, refused: Iterable[str]) -> bool:
        """Try the next way of each feature that uses one of these programs. False: no feature uses any of them."""
        names = set(refused)
        hit = [feature for feature in self.features if names & set(*self._ways(feature)[:1])]
        for feature in hit:
            self._way[feature] += 1
        return bool(hit)

    def missing(self) -> tuple[str, ...]:
        """The features that cannot be provided."""
        return tuple(feature.meaning for feature in self.features if not self._ways(feature))

    def way(self, feature: Feature) -> tuple[str, ...]:
        """The programs that provide the feature; empty: it is missing, or not wanted."""
        return next(iter(self._ways(feature)), ()) if feature in self._way else ()

    def _ways(self, feature: Feature) -> tuple[tuple[str, ...], ...]:
        return feature.ways[self._way[feature] :]
