"""BPF programs that a kernel may lack. A feature without a supported program is listed as missing.

Support is determined by loading: if the kernel refuses a program, the feature's next set of programs is tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Feature(NamedTuple):
    """A kind of event of the machine. alternatives: sets of programs that provide it, best set first."""

    meaning: str
    alternatives: tuple[tuple[str, ...], ...]


SERVING = ("serving_read", "serving_sent", "serving_state", "serving_arrival")
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
    # Attaches to the function of this system call: other system calls have no overhead.
    "function": ("ioctl_enter", "ioctl_leave"),
    "tracepoint": ("ioctl_enter_any", "ioctl_leave_any"),
}
"""Programs that trace calls into the GPU driver, by method, best first."""

ON_REQUEST = ("peek", *SERVING)
"""Programs that are not attached at the start: `peek` runs on request."""


def driver_calls(methods: Iterable[str]) -> Feature:
    """Calls into the GPU driver, only if requested. methods: keys of IOCTL_WAYS, to be tried in order."""
    return Feature("calls into the GPU driver", tuple(IOCTL_WAYS[method] for method in methods))


@dataclass
class OptionalPrograms:
    """The set of programs that each feature uses. A feature without a remaining set is missing."""

    features: tuple[Feature, ...] = FEATURES
    _alternative: dict[Feature, int] = field(init=False)

    def __post_init__(self) -> None:
        self._alternative = dict.fromkeys(self.features, 0)

    def programs(self) -> list[str]:
        """The programs to load."""
        return [
            name for feature in self.features for names in self._alternatives(feature)[:1] for name in names
        ]

    def give_up(self, refused: Iterable[str]) -> bool:
        """Try the next set of each feature that uses one of these programs. False: no feature uses any of them."""
        names = set(refused)
        affected = [feature for feature in self.features if names & set(*self._alternatives(feature)[:1])]
        for feature in affected:
            self._alternative[feature] += 1
        return bool(affected)

    def missing(self) -> tuple[str, ...]:
        """The features that cannot be provided."""
        return tuple(feature.meaning for feature in self.features if not self._alternatives(feature))

    def programs_of(self, feature: Feature) -> tuple[str, ...]:
        """The programs that provide the feature; empty: it is missing, or was not requested."""
        return next(iter(self._alternatives(feature)), ()) if feature in self._alternative else ()

    def _alternatives(self, feature: Feature) -> tuple[tuple[str, ...], ...]:
        return feature.alternatives[self._alternative[feature] :]
