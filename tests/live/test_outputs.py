"""Outputs of an agent while a job runs: incidents as spans, metrics, its own API."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from stallscope.demo.traced import MIN_OCCURRENCES
from stallscope.store import node as store

from ..exporters.test_otlp import Receiver, over_http

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

SECONDS = 8.0


def attributes(span: object) -> dict[str, object]:
    return {attribute.key: attribute.value for attribute in span.attributes}


def test_a_job_is_exported_by_otlp_prometheus_and_the_agent_api(agent, job, only, tmp_path: Path):
    receiver = Receiver()
    with over_http(receiver) as url:
        running = job("sleep", ranks=3, seconds=SECONDS, min_occurrences=MIN_OCCURRENCES)
        tracing = agent(
            *only(running), "--otlp", url, "--prometheus", "127.0.0.1:0", "--serve", "127.0.0.1:0"
        )
        tracing.says("serving")
        tracing.says("attached", "libnccl")
        tracing.says("attached", "libcudart")
        running.go()
        assert running.wait(90)
        message = "\n".join(tracing.lines())
        (metrics,) = (line.split()[-1] for line in tracing.lines() if line.startswith("metrics at"))
        (served,) = (line.split("https://")[1].split()[0] for line in tracing.lines() if "serving" in line)
        text = urllib.request.urlopen(metrics).read().decode()
        words = [
            "query",
            "SELECT rank_of(node, pid) AS r, count(*) AS n FROM collectives GROUP BY r ORDER BY r",
        ]
        words += ["--json", "--nodes", served, "--token-file", str(tmp_path / "api/token")]
        words += ["--ca-cert", str(tmp_path / "api/ca.crt")]
        asked = subprocess.run(
            [sys.executable, "-c", "from stallscope.cli import main; main()", *words],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert asked.returncode == 0, asked.stderr
        assert tracing.ended(signal.SIGINT) == 0, message
    (span,) = (s for request in receiver.spans for s in request.resource_spans[0].scope_spans[0].spans)
    output = attributes(span)
    assert output["stallscope.verdict.kind"].string_value == "straggler"
    assert [v.int_value for v in output["stallscope.ranks"].array_value.values] == [2]
    assert output["stallscope.cause"].string_value == "host_sleep"
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60 * 10**9

    trace = store.read(tracing.db)
    newest = {
        metric.name: metric for metric in receiver.metrics[-1].resource_metrics[0].scope_metrics[0].metrics
    }
    calls = sum(point.as_int for point in newest["nccl.collective.calls"].sum.data_points)
    assert calls == len(trace.collectives)
    assert 'stallscope_incidents_total{node="here",stallscope_cause="host_sleep"' in text
    assert 'nccl_collective_lateness_seconds_count{nccl_rank="2",node="here"}' in text
    assert [row["r"] for row in json.loads(asked.stdout)["rows"]] == [0, 1, 2]
