"""The Grafana dashboards: valid, current, and each query answered by a real hub or a known metric."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.serve.answering import Answering, answering
from tests.serve.test_grafana import sent
from tests.serve.tools import cluster

from stallscope.exporters.metric_table import METRICS

FOLDER = Path(__file__).parents[2] / "deploy/grafana"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_generate", FOLDER / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", ["cluster.json", "node.json"])
def test_dashboard_is_current_and_valid(generator: ModuleType, name: str):
    from grafana_foundation_sdk.models.dashboard import Dashboard

    assert read(name) == generator.DASHBOARDS[name](), "run: python deploy/grafana/generate.py"
    parsed = Dashboard.from_json(read(name))
    assert len(parsed.panels) == len(read(name)["panels"])
    assert len({panel["id"] for panel in read(name)["panels"]}) == len(parsed.panels)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("hub")
    with cluster.hub_in(folder / "store") as made:
        cluster.fill(made.store, "a", "alpha")
        with answering(made, folder) as result:
            yield result


def queries() -> list[dict[str, Any]]:
    board = read("cluster.json")
    panels = [panel["targets"][0] for panel in board["panels"]]
    return [*panels, *(each["target"] for each in board["annotations"]["list"])]


def test_every_query_of_the_cluster_dashboard_returns_its_columns(hub: Answering):
    n_rows = 0
    for query in queries():
        url = query["url"].replace("${hub_url}", "$HUB")
        body = query["url_options"]["data"].replace("${cluster}", "alpha")
        status, answer = sent(hub, url, body, token=hub.token(("read",), "a"))
        assert status == 200, answer
        rows = answer[query["root_selector"]]
        n_rows += len(rows)
        for row in rows:
            assert {column["selector"] for column in query["columns"]} <= row.keys()
    assert n_rows > 5


def expressions() -> list[str]:
    return [panel["targets"][0]["expr"] for panel in read("node.json")["panels"]]


def test_every_metric_of_the_node_dashboard_exists():
    known = {metric.prometheus_name for metric in METRICS}
    for expression in expressions():
        (name,) = re.findall(r"\b(\w+)\{", expression)
        assert name.removesuffix("_bucket") in known, expression


def test_every_expression_of_the_node_dashboard_is_valid(repository: Path, tmp_path: Path):
    promtool = repository / "build/prometheus/usr/bin/promtool"
    if not promtool.exists():
        pytest.skip("promtool: it was not downloaded (make setup)")
    rules = [
        {"record": f"r{number}", "expr": text.replace("$__rate_interval", "1m").replace("$instance", ".*")}
        for number, text in enumerate(expressions())
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
