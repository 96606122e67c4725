"""Alertmanager's API v2. Source: https://github.com/prometheus/alertmanager/blob/main/api/v2/openapi.yaml

The labels identify an alert, so that they stay as they were when the alert was raised; the current severity is an
annotation. Alertmanager ends an alert that is not repeated, so that an open alert is sent again every minute.
"""

import time

from stallscope.alerts.config import Alertmanager
from stallscope.alerts.receivers.http import post
from stallscope.alerts.state import Delivery
from stallscope.events.clock_text import iso_utc

RENEW_NS = 60 * 10**9
_VALID_NS = 5 * RENEW_NS


def send(receiver: Alertmanager, delivery: Delivery) -> None:
    """Raises DeliveryFailed."""
    headers = {"Authorization": f"Bearer {receiver.token.value()}"} if receiver.token else {}
    body = [alert(delivery, receiver.labels, time.time_ns())]
    post(f"{receiver.url.rstrip('/')}/api/v2/alerts", body, headers)


def alert(delivery: Delivery, labels: dict[str, str], now_ns: int) -> dict[str, object]:
    """One entry of the request body. labels: of the configuration, added to every alert."""
    notice = delivery.notice
    # Alertmanager removes labels without a value, so that every label here has one.
    fixed = {"tenant": notice.tenant, "cluster": notice.cluster}
    end_ns = now_ns if delivery.change == "resolved" else now_ns + _VALID_NS
    return {
        "labels": {
            **labels,
            "alertname": "StallscopeIncident",
            "alert": notice.key,
            **{name: value for name, value in fixed.items() if value},
        },
        "annotations": {
            "summary": notice.title,
            "description": "\n".join(notice.lines),
            "action": notice.action,
            "severity": notice.severity,
            "kind": notice.kind,
            "nodes": ", ".join(notice.nodes),
        },
        "startsAt": iso_utc(notice.begin_ns),
        "endsAt": iso_utc(end_ns),
        **({"generatorURL": notice.link} if notice.link else {}),
    }
