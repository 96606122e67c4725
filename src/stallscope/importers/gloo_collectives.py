"""Collectives of gloo in a PyTorch profile: operators without a kernel, which last until the completion.

PyTorch records "gloo:all_reduce" in the calling thread or, from 2.8 on, in a thread of gloo; the call is then the
operator "c10d::allreduce_" of the calling thread, in the same order. Calls of other backends have that name too.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Op
from stallscope.importers.kernel_arguments import whole
from stallscope.importers.rank_profile import Collective, op_of_name

PREFIX, CALL_PREFIX = "gloo:", "c10d::"
_MAX_RANKS = 1 << 17


class GlooCollective(NamedTuple):
    """A collective: the call, for how long the calling thread waits, and the completion."""

    name: str
    op: Op
    begin_ns: int
    wait_ns: int
    end_ns: int
    tid: int


def only_group(info: dict[str, Any]) -> Collective:
    """The group of all collectives, if the job has a single group. info: the profile's distributedInfo."""
    groups, size = info.get("pg_config"), whole(info.get("world_size"))
    n_groups = len(groups) if isinstance(groups, list) else whole(info.get("pg_count"))
    if not 1 < size <= _MAX_RANKS or n_groups not in (1, UNKNOWN):
        return Collective(Op.NONE)
    ranks = tuple(range(size))
    return Collective(Op.NONE, group="all ranks", ranks=ranks, ranks_text=str([*ranks]), size=size)


class _Span(NamedTuple):
    begin_ns: int
    end_ns: int
    tid: int
    name: str


@dataclass
class GlooCollectives:
    """Operators of one profile."""

    _collectives: dict[Op, list[_Span]] = field(default_factory=lambda: defaultdict(list))
    _calls: dict[Op, list[_Span]] = field(default_factory=lambda: defaultdict(list))

    def take(self, name: str, begin_ns: int, end_ns: int, tid: int) -> bool:
        """Keep an operator whose name begins with PREFIX or CALL_PREFIX. False: it is not a collective."""
        op = op_of_name(name)
        if op is not None:
            kept = self._collectives if name.startswith(PREFIX) else self._calls
            kept[op].append(_Span(begin_ns, end_ns, tid, name))
        return op is not None

    def collectives(self, work: Array) -> list[GlooCollective]:
        """In the order of the calls. A thread waits until the end, or until it begins other recorded work.

        work: rank_profile.WORK.
        """
        pairs = [(op, *pair) for op in self._collectives for pair in self._pairs(op)]
        pairs.sort(key=lambda pair: pair[1].begin_ns)
        begins = {
            tid: np.sort(work["begin_ns"][work["tid"] == tid]) for tid in {call.tid for _, call, _ in pairs}
        }
        return [
            GlooCollective(
                name=span.name,
                op=op,
                begin_ns=call.begin_ns,
                wait_ns=max(_next(begins[call.tid], call, span.end_ns) - call.begin_ns, 0),
                end_ns=max(span.end_ns, call.begin_ns),
                tid=call.tid,
            )
            for op, call, span in pairs
        ]

    def _pairs(self, op: Op) -> list[tuple[_Span, _Span]]:
        """The call of each collective, or its own operator where the call is not certain.

        Calls have the same name for all backends, so their number must equal the number of the collectives. Collectives
        before the first call, and calls after the last collective, do not count: the profile cuts off their pairs.
        """
        spans, calls = sorted(self._collectives[op]), sorted(self._calls[op])
        calls = [call for call in calls if call.begin_ns <= spans[-1].begin_ns]
        n_cut = sum(span.begin_ns < calls[0].begin_ns for span in spans) if calls else len(spans)
        pairs = list(zip(calls, spans[n_cut:], strict=False))
        if len(calls) != len(spans) - n_cut or any(call.begin_ns > span.begin_ns for call, span in pairs):
            return [(span, span) for span in spans]
        return [*((span, span) for span in spans[:n_cut]), *pairs]


def _next(begins_ns: Array, call: _Span, end_ns: int) -> int:
    """When the calling thread continues. begins_ns: of its recorded work, sorted."""
    own_end_ns = call.end_ns if call.name.startswith(CALL_PREFIX) else call.begin_ns
    at = int(np.searchsorted(begins_ns, own_end_ns, side="right"))
    return min(end_ns, int(begins_ns[at])) if at < len(begins_ns) else end_ns
