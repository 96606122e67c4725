"""Other requests delay a late request: a long prompt, a full KV cache, more requests than the engine can answer."""

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.code_locations import is_own
from stallscope.diagnose.serving.late_delay import HALF, Delay
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.diagnose.serving.late_requests import MANY_WAITING, is_long_prompt, n_before, waits_for_room
from stallscope.diagnose.serving.own_metrics import pressure
from stallscope.events.layout import UNKNOWN


def long_prompt(delay: Delay) -> Reason | None:
    """Another request with a much longer prompt was worked on before its first token."""
    rows, own = delay.requests, delay.late.request
    others = rows[is_long_prompt(rows) & (rows["first_ns"] != UNKNOWN)]
    others = others[(others["ts_ns"] != own["ts_ns"]) | (others["pid"] != own["pid"])]
    shared = np.minimum(others["first_ns"], delay.end_ns) - np.maximum(others["read_ns"], delay.begin_ns)
    if not len(others) or shared.max() < delay.min_ns:
        return None
    longest = others[shared.argmax()]
    text = f"{longest['path'].decode('utf-8', 'replace')} with {int(longest['request_bytes']):,} bytes"
    running = delay.threads.running(delay.begin_ns, delay.end_ns, pid=delay.holder_pid)
    line = running.line if running and is_own(running.line) else None
    return Reason("long_prompt", delay.holder_pid, CauseEvidence(work=text, line=line))


def kv_cache(delay: Delay) -> Reason | None:
    """The engine's own metrics show that its KV cache was full while the request waited."""
    rows, own = delay.threads.trace.engine_metrics, delay.late.request
    rows = rows[(rows["node"] == own["node"]) & np.isin(rows["pid"], delay.threads.pids)]
    state = pressure(rows, delay.begin_ns, delay.end_ns)
    if not state or not state.is_full:
        return None
    return Reason("kv_cache", int(rows["pid"][-1]), CauseEvidence(work=state.text()))


def capacity(delay: Delay) -> Reason | None:
    """The request waited behind several earlier requests while the engine completed responses at a steady rate.

    The engine answers requests that wait in a queue in the order of their arrival, or when another request ends.
    """
    rows, own = delay.requests, delay.late.request
    if delay.late.part == "gap" or n_before(rows, np.array([own["ts_ns"]]))[0] < MANY_WAITING:
        return None
    done_ns = np.sort(rows["end_ns"][(rows["end_ns"] > delay.begin_ns) & (rows["end_ns"] < delay.end_ns)])
    pauses_ns = np.diff(np.concatenate([[delay.begin_ns], done_ns, [delay.end_ns]]))
    if len(done_ns) < MANY_WAITING or pauses_ns.max() > HALF * (delay.end_ns - delay.begin_ns):
        return None
    if _is_overtaken(delay) and not waits_for_room(rows[rows["first_ns"] != UNKNOWN]):
        return None
    rate = round(len(done_ns) / (delay.end_ns - delay.begin_ns) * 1e9, 2)
    return Reason("capacity", int(own["pid"]), CauseEvidence(calls_per_second=rate))


def _is_overtaken(delay: Delay) -> bool:
    """Whether many requests that arrived after the late request were answered before it."""
    rows, own = delay.requests, delay.late.request
    is_later = (rows["ts_ns"] > own["ts_ns"]) & (rows["path"] == own["path"])
    n_first = int((is_later & (rows["first_ns"] != UNKNOWN) & (rows["first_ns"] < own["first_ns"])).sum())
    return n_first > HALF * n_before(rows, np.array([own["ts_ns"]]))[0]
