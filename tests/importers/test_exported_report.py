"""Files that stallscope exported give the answer of the trace that they were exported from."""

import json
from pathlib import Path
from random import Random

import pytest
from google.protobuf.json_format import MessageToDict

from stallscope.exporters.otlp_messages import Incident, resource, spans_request
from stallscope.live.incident_lines import ATTRIBUTES

from .generators import dumps, profiles
from .generators.job import Job

LATE = Job(n_ranks=4, culprits=(2,))
JOBS = {
    "late": (profiles.FORMATS[0], LATE),
    "healthy": (profiles.FORMATS[0], Job(n_ranks=4, culprits=())),
    "hang": (dumps.FORMATS[0], LATE),
}


def facts(report: dict) -> list[tuple]:
    return [
        (
            v["kind"],
            v["ranks"],
            v["summary"],
            [c["cause"] for c in v["causes"]],
            (v["cost"] or {}).get("gpu_seconds"),
        )
        for v in report["verdicts"]
    ]


@pytest.mark.parametrize("form", ["perfetto", "chrome"])
@pytest.mark.parametrize("job", JOBS)
def test_a_timeline_repeats_the_answer(run, tmp_path: Path, job: str, form: str):
    writer, content = JOBS[job]
    folder = tmp_path / "job"
    folder.mkdir()
    writer.write(folder, content, Random(3))
    db, out = tmp_path / "trace.db", tmp_path / ("t.pftrace" if form == "perfetto" else "t.json")
    assert run("import", folder, "--db", db)[0] == 0
    code, text, _ = run("explain", "--json", "--db", db)
    assert run("export", "--db", db, "--format", form, "-o", out)[0] == 0
    again, text_again, _ = run("explain", "--json", out)
    report, repeated = json.loads(text), json.loads(text_again)
    assert (again, repeated["answer"]) == (code, report["answer"])
    assert facts(repeated) == facts(report)


def test_incident_spans_repeat_the_verdict(run, tmp_path: Path):
    attributes = {"stallscope.kind": "straggler", "stallscope.ranks": [2], "stallscope.cause": "child"}
    assert set(attributes) <= set(ATTRIBUTES)
    incident = Incident("i1", "straggler", 10**18, 2 * 10**18, "rank 2 slows down the job", attributes)
    request = spans_request([incident], resource("node0"))
    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps(MessageToDict(request)) + "\n")
    code, text, _ = run("explain", "--json", file)
    (verdict,) = json.loads(text)["verdicts"]
    assert code == 20
    assert (verdict["kind"], verdict["ranks"], verdict["summary"]) == (
        "straggler",
        [2],
        "rank 2 slows down the job",
    )


def test_a_damaged_export_is_one_line(run, tmp_path: Path):
    file = tmp_path / "t.json"
    file.write_text('{"displayTimeUnit": "ms",\n"otherData": {"clock_ns": 1},\n"traceEvents": [{"ph": "X"')
    code, _, err = run("explain", file)
    assert code == 2
    assert "damaged export" in err
    assert "Traceback" not in err
