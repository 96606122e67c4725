"""Writes the dashboards next to this file: python deploy/grafana/generate.py

cluster.json asks the hub's API with the Infinity data source; node.json asks Prometheus for the metrics of agents.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCHEMA_VERSION = 39
INFINITY = {"type": "yesoreyeram-infinity-datasource", "uid": "${hub}"}
PROMETHEUS = {"type": "prometheus", "uid": "${prometheus}"}
WINDOW = '"from": ${__from}, "to": ${__to}'
OF_CLUSTER = f'{{"cluster": "${{cluster}}", {WINDOW}}}'
NODE = 'instance=~"$instance"'

CLUSTER_PANELS = [
    # type, title, tool, body, columns, x, y, width, height
    (
        "table",
        "Clusters",
        "summary",
        "{}",
        ["cluster", "n_nodes", "n_ranks", "n_gpus", "n_open_verdicts", "last_seen"],
        (0, 0, 24, 6),
    ),
    (
        "table",
        "Open verdicts",
        "verdicts",
        f'{{"cluster": "${{cluster}}", "state": "open", {WINDOW}}}',
        [
            "severity",
            "kind",
            "summary",
            "cluster",
            "ranks",
            "nodes",
            "cause",
            "late_ms",
            "gpu_seconds",
            "since",
        ],
        (0, 6, 24, 8),
    ),
    (
        "table",
        "Late ranks",
        "find_outlier_nodes",
        OF_CLUSTER,
        ["cluster", "node", "rank", "lag_ms", "max_late_ms", "share_late"],
        (0, 14, 12, 9),
    ),
    (
        "barchart",
        "GPU seconds lost to stragglers",
        "get_cost",
        f'{{"cluster": "${{cluster}}", "by": "rank", {WINDOW}}}',
        ["node", "gpu_seconds"],
        (12, 14, 12, 9),
    ),
    (
        "table",
        "Cost by cluster",
        "get_cost",
        f'{{"by": "cluster", {WINDOW}}}',
        ["cluster", "n_incidents", "gpu_seconds", "usd", "usd_per_hour"],
        (0, 23, 12, 7),
    ),
    (
        "table",
        "Closed verdicts",
        "verdicts",
        f'{{"cluster": "${{cluster}}", "state": "closed", {WINDOW}}}',
        ["severity", "kind", "summary", "ranks", "since", "until", "gpu_seconds"],
        (12, 23, 12, 7),
    ),
]
NODE_PANELS = [
    ("GPU processes", f"sum by (instance) (stallscope_processes{{{NODE}}})", "short"),
    (
        "Open incidents",
        f"sum by (instance, stallscope_verdict_kind, stallscope_cause) (stallscope_incidents_open{{{NODE}}})",
        "short",
    ),
    (
        "Lateness of ranks, p99",
        "histogram_quantile(0.99, sum by (nccl_rank, le) "
        f"(rate(nccl_collective_lateness_seconds_bucket{{{NODE}}}[$__rate_interval])))",
        "s",
    ),
    (
        "Time of GPU processes by category",
        f"sum by (stallscope_category) (rate(gpu_process_time_seconds_total{{{NODE}}}[$__rate_interval]))",
        "percentunit",
    ),
    (
        "Collectives per second",
        f"sum by (nccl_rank, nccl_operation) (rate(nccl_collective_calls_total{{{NODE}}}[$__rate_interval]))",
        "ops",
    ),
    (
        "Records lost",
        f"sum by (stallscope_loss) (rate(stallscope_records_lost_total{{{NODE}}}[$__rate_interval]))",
        "ops",
    ),
    (
        "Node health, as a share of the median",
        f"min by (instance) (stallscope_node_health_ratio{{{NODE}}})",
        "percentunit",
    ),
]


def infinity_query(tool: str, body: str, columns: list[str]) -> dict[str, Any]:
    """A request that the backend parser of the data source turns into a frame."""
    return {
        "refId": "A",
        "datasource": INFINITY,
        "type": "json",
        "parser": "backend",
        "format": "table",
        "source": "url",
        "url": f"${{hub_url}}/api/v1/tools/fleet.cluster.{tool}",
        "url_options": {
            "method": "POST",
            "body_type": "raw",
            "body_content_type": "application/json",
            "data": body,
        },
        "root_selector": "rows",
        "columns": [{"selector": name, "text": name, "type": _type(name)} for name in columns],
    }


def _type(column: str) -> str:
    if column in ("since", "until", "last_seen"):
        return "timestamp"
    is_number = (
        column.startswith("n_") or column.endswith(("_ms", "_seconds")) or column in ("usd", "usd_per_hour")
    )
    return "number" if is_number or column in ("rank", "share_late") else "string"


def panel(number: int, kind: str, title: str, at: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    x, y, width, height = at
    position = {"x": x, "y": y, "w": width, "h": height}
    return {"id": number, "type": kind, "title": title, "gridPos": position, **more}


def variable(name: str, label: str, kind: str, query: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "type": kind, "query": query, **more}


def dashboard(
    uid: str, title: str, panels: list[dict[str, Any]], variables: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["stallscope"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def cluster_dashboard() -> dict[str, Any]:
    panels = [
        panel(
            number,
            kind,
            title,
            at,
            datasource=INFINITY,
            targets=[infinity_query(tool, body, columns)],
            fieldConfig={"defaults": {}, "overrides": []},
            options={},
        )
        for number, (kind, title, tool, body, columns, at) in enumerate(CLUSTER_PANELS, 1)
    ]
    variables = [
        variable("hub", "Hub", "datasource", "yesoreyeram-infinity-datasource"),
        variable("hub_url", "Address of the hub", "textbox", "https://hub.example:8081"),
        variable("cluster", "Cluster", "textbox", "default"),
    ]
    made = dashboard("stallscope-cluster", "Stallscope: cluster", panels, variables)
    incidents = infinity_query("verdicts", OF_CLUSTER, ["since", "until", "summary", "severity"])
    made["annotations"] = {
        "list": [
            {
                "name": "Verdicts",
                "enable": True,
                "iconColor": "red",
                "datasource": INFINITY,
                "target": incidents,
                "mappings": {
                    "time": {"source": "field", "value": "since"},
                    "timeEnd": {"source": "field", "value": "until"},
                    "text": {"source": "field", "value": "summary"},
                    "tags": {"source": "field", "value": "severity"},
                },
            }
        ]
    }
    return made


def node_dashboard() -> dict[str, Any]:
    panels = [
        panel(
            number,
            "timeseries",
            title,
            ((number - 1) % 2 * 12, (number - 1) // 2 * 8, 12, 8),
            datasource=PROMETHEUS,
            targets=[{"refId": "A", "datasource": PROMETHEUS, "expr": expression}],
            fieldConfig={"defaults": {"unit": unit}, "overrides": []},
            options={},
        )
        for number, (title, expression, unit) in enumerate(NODE_PANELS, 1)
    ]
    instances = variable(
        "instance",
        "Machine",
        "query",
        "label_values(stallscope_processes, instance)",
        datasource=PROMETHEUS,
        multi=True,
        includeAll=True,
        refresh=2,
    )
    variables = [variable("prometheus", "Prometheus", "datasource", "prometheus"), instances]
    return dashboard("stallscope-node", "Stallscope: machines", panels, variables)


DASHBOARDS = {"cluster.json": cluster_dashboard, "node.json": node_dashboard}

if __name__ == "__main__":
    for name, make in DASHBOARDS.items():
        (FOLDER / name).write_text(json.dumps(make(), indent=1) + "\n")
