"""Traces on the wire, and several as one: nothing is lost on the way."""

from dataclasses import replace

import numpy as np

from stallscope.events import layout
from stallscope.events.trace import Coverage, Gap, Trace
from stallscope.query.wire_format import packed, together, unpacked

from ..diagnose.builders import MS, dp_trace, every


def labelled() -> Trace:
    """A job that sets a label."""
    labels = layout.empty(layout.ANNOTATIONS, 1)
    labels["ts_ns"], labels["pid"], labels["label"] = 5 * MS, 7, b"phase"
    return replace(dp_trace(every(2, 7, 50 * MS)), annotations=labels)


def test_every_array_arrives_as_it_was_sent():
    trace = labelled()
    result = unpacked(packed(trace))
    assert len(result.annotations) == 1
    for table in layout.ARRAYS:
        assert np.array_equal(getattr(result, table.name), getattr(trace, table.name))


def test_labels_stay_with_their_machine():
    whole = together([labelled(), labelled()])
    assert whole.annotations["node"].tolist() == [0, len(labelled().nodes)]
    assert whole.annotations["label"].tolist() == [b"phase", b"phase"]


def test_the_coverage_of_each_source_arrives_and_is_joined():
    gap = Gap("the kernels carry no arguments", "Record again with a newer version.")
    trace = replace(dp_trace(), coverage=Coverage(("slowness",), {"negative durations": 2}, (gap,)))
    assert unpacked(packed(trace)).coverage == trace.coverage
    assert together([trace, trace]).coverage == replace(trace.coverage, omitted={"negative durations": 4})
