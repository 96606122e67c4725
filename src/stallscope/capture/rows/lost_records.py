"""Records lost since the last reading, by kind and CPU, from counters that only grow.

Not every counter is a loss: missed switches that were corrected, or ledgers that changed while they were copied, reduce
accuracy but lose no record.
"""

from dataclasses import dataclass, field

from stallscope.events.kernel import Counter
from stallscope.events.layout import Array

_PREFIX = "LOST_"
DROPPED = "dropped"
"""Kind of the records that the agent itself dropped."""


@dataclass
class Losses:
    """The counters at the last reading. n_lost: records lost so far, of all kinds."""

    n_lost: int = 0
    _last: dict[tuple[str, int | None], int] = field(default_factory=dict)

    def new_losses(self, counters: Array, *, n_dropped: int = 0) -> list[tuple[str, int | None, int]]:
        """(kind, CPU, records) of the losses since the last call; the CPU is None for the agent's own.

        counters: int64 (len(Counter), CPUs), as returned by Program.counters().
        """
        totals: dict[tuple[str, int | None], int] = {
            (counter.name.removeprefix(_PREFIX).lower(), cpu): int(n)
            for counter in Counter
            if counter.name.startswith(_PREFIX)
            for cpu, n in enumerate(counters[counter])
        }
        totals[DROPPED, None] = n_dropped
        losses = [(*key, n - self._last.get(key, 0)) for key, n in totals.items()]
        self._last = totals
        self.n_lost = sum(totals.values())
        return [loss for loss in losses if loss[2] > 0]
