"""What was lost since the last look, by kind and CPU, from counters that only grow.

Not every counter is a loss: switches that were missed and put right, or ledgers that changed while they were
copied, cost accuracy and no record.
"""

from dataclasses import dataclass, field

from stallscope.events.kernel import Counter
from stallscope.events.layout import Array

_PREFIX = "LOST_"
DROPPED = "dropped"
"""Kind of what the agent itself could not keep up with."""


@dataclass
class Losses:
    """How far the counters had come at the last look. n_lost: records lost so far, of all kinds."""

    n_lost: int = 0
    _seen: dict[tuple[str, int | None], int] = field(default_factory=dict)

    def new(self, counters: Array, *, n_dropped: int = 0) -> list[tuple[str, int | None, int]]:
        """(kind, CPU, records) of what was lost since the last call; the CPU is None for the agent's own.

        counters: int64 (len(Counter), CPUs), as Program.counters() gives them.
        """
        totals: dict[tuple[str, int | None], int] = {
            (counter.name.removeprefix(_PREFIX).lower(), cpu): int(n)
            for counter in Counter
            if counter.name.startswith(_PREFIX)
            for cpu, n in enumerate(counters[counter])
        }
        totals[DROPPED, None] = n_dropped
        new = [(*which, n - self._seen.get(which, 0)) for which, n in totals.items()]
        self._seen = totals
        self.n_lost = sum(totals.values())
        return [one for one in new if one[2] > 0]
