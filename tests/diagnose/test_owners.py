"""The owner of a verdict: the labels that the named processes have in common."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose import diagnose, verdict_as_json
from stallscope.diagnose.report import text
from stallscope.events import layout

from .builders import MS, dp_trace, every


def labelled(owners: dict[int, dict[str, str]]):
    """A job whose rank 2 is late, with labels by rank."""
    trace = dp_trace(every(2, 7, 50 * MS))
    pids = trace.collectives["pid"][np.argsort(trace.collectives["comm_rank"], kind="stable")]
    pid_of = dict(zip(np.sort(trace.collectives["comm_rank"]).tolist(), pids.tolist(), strict=True))
    values = [(pid_of[rank], name, value) for rank, own in owners.items() for name, value in own.items()]
    rows = layout.empty(layout.ANNOTATIONS, len(values))
    rows["pid"] = [pid for pid, _, _ in values]
    rows["label"] = [name.encode() for _, name, _ in values]
    rows["value"] = [value.encode() for _, _, value in values]
    return replace(trace, annotations=rows)


def test_owner_is_that_of_the_named_rank():
    own = {"job": "4711", "job_name": "train", "user": "ann", "account": "ml"}
    report = diagnose(labelled({rank: own | {"pod": f"p{rank}"} for rank in range(4)}))
    (verdict,) = report.verdicts
    assert verdict.owner == own | {"pod": "p2"}
    assert verdict_as_json(verdict)["owner"] == verdict.owner
    assert "  owner       job 4711 (train), user ann, account ml, pod p2\n" in text.report(report)


def test_verdict_without_labels_has_no_owner():
    report = diagnose(labelled({}))
    assert report.verdicts[0].owner == {}
    assert "  owner" not in text.report(report)
