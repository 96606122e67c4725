"""The coverage of probes that no governor switches."""

from dataclasses import dataclass, field

from stallscope.capture.rows.call_statistics import ProbedInterval
from stallscope.events.kernel import HookGroup


@dataclass
class AlwaysOn:
    """The coverage of probes that are always on."""

    since_ns: int
    _since_ns: dict[HookGroup, int] = field(default_factory=dict)

    def probed_interval(self, group: HookGroup, now_ns: int) -> ProbedInterval:
        """The whole interval since the last result."""
        interval_ns = now_ns - self._since_ns.get(group, self.since_ns)
        self._since_ns[group] = now_ns
        return ProbedInterval(interval_ns, interval_ns)
