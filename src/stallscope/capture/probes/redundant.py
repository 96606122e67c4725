"""Finds groups of probes that report nothing of their own at present, so that the governor detaches them.

RUNTIME_WAITS: cudaStreamSynchronize calls cuStreamSynchronize, and both have probes. Where every call of the runtime
contained such a call of the driver, the driver's probes alone give the same ledger for a third less. The calls then
have the driver's names. GRAPH_LAUNCHES: these probes count the collectives in a launched graph, so they are not needed
while no process on the machine has called NCCL.

A new process switches both groups on again: a call may differ in it, and its graphs may contain collectives.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stallscope.capture.probes.maps import Entries
from stallscope.events.kernel import HookGroup

_MIN_ON_NS = 10**9
"""A group is judged from calls over at least this time."""
_MIN_WAITS_HZ = 200
"""Below this rate of waits the additional probes cost at most 0.1 % of a thread, and the runtime's names are kept."""
_BARE_NS = 10 * 10**9
"""One call of the runtime without a call of the driver keeps the probes on for this long."""


@dataclass
class Redundant:
    """Judges the groups from the kernel's counts. since_ns: when the groups were switched on.

    has_runtime_waits: whether the probes of RUNTIME_WAITS counted a call when they were last judged.
    """

    since_ns: int
    has_runtime_waits: bool = True
    _counted_ns: int = 0
    _before: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    _last_bare_ns: int | None = None

    def renew(self, now_ns: int) -> None:
        """Judge from the beginning."""
        self.since_ns = self._counted_ns = now_ns
        self._before = {}

    def groups(self, processes: Entries, now_ns: int) -> set[HookGroup]:
        """The groups that are redundant now. processes: kernel.PROCESS by process."""
        redundant: set[HookGroup] = set()
        if now_ns - self.since_ns < _MIN_ON_NS:
            return redundant
        if not processes.values["uses_nccl"].any():
            redundant.add(HookGroup.GRAPH_LAUNCHES)
        if self._waits_are_contained(processes, now_ns):
            redundant.add(HookGroup.RUNTIME_WAITS)
        return redundant

    def _waits_are_contained(self, processes: Entries, now_ns: int) -> bool:
        slots = processes.values["slots"]
        contained, bare = (slots[name].sum(axis=1).tolist() for name in ("n_contained", "n_bare"))
        counts = dict(zip(processes.keys.tolist(), zip(contained, bare, strict=True), strict=True))
        elapsed_ns = now_ns - self._counted_ns
        if self._before and elapsed_ns < _MIN_ON_NS:
            return False
        before, self._before, self._counted_ns = self._before, counts, now_ns
        grown = [(n - before[pid][0], m - before[pid][1]) for pid, (n, m) in counts.items() if pid in before]
        self.has_runtime_waits = any(n_contained + n_bare > 0 for n_contained, n_bare in grown)
        if any(n_bare > 0 for _, n_bare in grown):
            self._last_bare_ns = now_ns
        is_bare = self._last_bare_ns is not None and now_ns - self._last_bare_ns < _BARE_NS
        most = max((n_contained for n_contained, _ in grown), default=0)
        return not is_bare and most * 10**9 >= _MIN_WAITS_HZ * elapsed_ns
