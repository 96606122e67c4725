"""The metrics as Prometheus sees them: by its client library's parser, and by a real Prometheus."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stallscope.errors import BadInput
from stallscope.exporters import metric_table as table_of
from stallscope.exporters.metric_values import MAX_SERIES, Meter
from stallscope.exporters.prometheus import host_and_port, metrics_server

from ..patience import PATIENCE_S

pytestmark = pytest.mark.live

BUCKET_FACTOR = 2 ** (1 / 8)
WAITS_S = np.array([0.002, 0.002, 0.02, 0.5, 99.0])


@pytest.fixture
def meter() -> Meter:
    made = Meter(0)
    made.add(table_of.COLLECTIVE_CALLS, 7, "2", "all_reduce")
    made.set(table_of.MEMORY_USAGE, 4096, "used")
    made.observe(table_of.COLLECTIVE_WAIT, WAITS_S, "2")
    return made


@pytest.fixture
def port(meter: Meter) -> Iterator[int]:
    with metrics_server(meter, "127.0.0.1:0", node="host-a") as port:
        yield port


def scraped(port: int) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_types_units_and_labels(port: int):
    result = scraped(port)
    calls = result["nccl_collective_calls"]
    assert calls.type == "counter"
    (sample,) = calls.samples
    assert (sample.name, sample.value) == ("nccl_collective_calls_total", 7)
    assert sample.labels == {"nccl_rank": "2", "nccl_operation": "all_reduce", "node": "host-a"}
    assert result["system_memory_usage_bytes"].type == "gauge"
    wait = result["nccl_collective_wait_duration_seconds"]
    assert wait.type == "histogram"
    values = {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in wait.samples}
    assert (values["count", None], values["sum", None]) == (5, pytest.approx(WAITS_S.sum()))
    assert (values["bucket", "0.003"], values["bucket", "0.03"], values["bucket", "+Inf"]) == (2, 3, 5)


def test_labels_are_bounded(meter: Meter, port: int):
    for i in range(3 * MAX_SERIES):
        meter.add(table_of.RECORDS, 1, f"table {i}")
    assert len(scraped(port)["stallscope_records"].samples) == MAX_SERIES + 1


@pytest.mark.pure
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        (":9464", ("0.0.0.0", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_addresses(given: str, wanted: tuple[str, int]):
    assert host_and_port(given) == wanted


def test_an_address_that_is_none_or_taken_is_refused(meter: Meter, port: int):
    with pytest.raises(BadInput, match="not a listen address"):
        host_and_port("host")
    with (
        pytest.raises(BadInput, match="choose another"),
        metrics_server(meter, f"127.0.0.1:{port}", node="b"),
    ):
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture(params=[()])
def prometheus(request: pytest.FixtureRequest, port: int, tmp_path: Path, repository: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes the metrics. The parameter has further arguments."""
    program = shutil.which("prometheus") or repository / "build/prometheus/usr/bin/prometheus"
    if not os.access(program, os.X_OK):
        pytest.skip("no prometheus to scrape with (make setup fetches it)")
    target = {"job_name": "node", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    at = f"127.0.0.1:{free_port()}"
    words = [
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={at}",
        *request.param,
    ]
    with subprocess.Popen([program, *words], stderr=subprocess.DEVNULL) as running:
        try:
            yield f"http://{at}"
        finally:
            running.terminate()


def asked(prometheus: str, query: str) -> list[dict]:
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                if result := json.load(response)["data"]["result"]:
                    return result
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Prometheus knows nothing of {query}")


def test_a_real_prometheus_scrapes_them_and_computes_with_them(prometheus: str):
    (entry,) = asked(prometheus, "nccl_collective_calls_total")
    assert (entry["metric"]["nccl_rank"], entry["value"][1]) == ("2", "7")
    (entry,) = asked(
        prometheus, "histogram_quantile(0.5, sum by (le) (nccl_collective_wait_duration_seconds_bucket))"
    )
    assert 0.01 < float(entry["value"][1]) <= 0.03
    (entry,) = asked(prometheus, 'up{job="node"}')
    assert entry["value"][1] == "1"


@pytest.mark.parametrize("prometheus", [("--enable-feature=native-histograms",)], indirect=True)
def test_a_real_prometheus_stores_native_histograms(prometheus: str):
    name = "nccl_collective_wait_duration_seconds"
    (entry,) = asked(prometheus, f"histogram_count({name})")
    assert entry["value"][1] == str(len(WAITS_S))
    for share, wait_s in ((0.5, WAITS_S[2]), (0.7, WAITS_S[3]), (0.9, WAITS_S[4])):
        (entry,) = asked(prometheus, f"histogram_quantile({share}, {name})")
        assert wait_s / BUCKET_FACTOR <= float(entry["value"][1]) <= wait_s * BUCKET_FACTOR
    (entry,) = asked(prometheus, "nccl_collective_calls_total")
    assert entry["metric"] | {"node": "host-a", "nccl_operation": "all_reduce"} == entry["metric"]


@pytest.mark.pure
def test_a_value_at_an_edge_belongs_to_the_bucket_below_it(meter: Meter):
    meter.observe(table_of.COLLECTIVE_WAIT, np.array([0.5, 1.0, 1.01, 2.0, 0.0]), "3")
    (series,) = (
        each.histogram
        for metric, all_series in meter.read()
        if metric is table_of.COLLECTIVE_WAIT
        for each in all_series
        if each.values == ("3",)
    )
    assert series is not None
    assert dict(series.native) == {-8: 1, 0: 1, 1: 1, 8: 1}
    assert series.n_zero == 1
