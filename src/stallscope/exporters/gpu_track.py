"""Driver readings of a node's GPUs as counters: memory, clock, utilisation. Each value holds until the next."""

from collections.abc import Iterator, Sequence

import numpy as np

from stallscope.events.layout import UNKNOWN
from stallscope.exporters.trace_context import TraceContext

_COUNTERS = (
    ("utilization_percent", "utilisation", "%"),
    ("memory_used_bytes", "memory used", "bytes"),
    ("sm_mhz", "SM clock", "MHz"),
)


def counters(context: TraceContext, node: int) -> Iterator[tuple[str, str, Sequence[tuple[int, float]]]]:
    """By GPU (or partition) and column: title, unit, (ns on the common clock, value) where known."""
    rows = context.trace.gpus
    rows = rows[rows["node"] == node]
    rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
    for gpu, mig in sorted(set(rows[["gpu", "mig"]].tolist())):
        own = rows[(rows["gpu"] == gpu) & (rows["mig"] == mig)]
        at = context.common_ns(node, own["ts_ns"])
        name = f"GPU {gpu}" if mig == UNKNOWN else f"GPU {gpu} MIG {mig}"
        for column, words, unit in _COUNTERS:
            known = own[column] != UNKNOWN
            if known.any():
                values = own[column][known].astype(np.float64)
                yield f"{name} {words}", unit, list(zip(at[known].tolist(), values.tolist(), strict=True))
