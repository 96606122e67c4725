"""Opsgenie's Alert API v2. Source: https://docs.opsgenie.com/docs/alert-api"""

from urllib.parse import quote

from stallscope.alerts.config import Opsgenie
from stallscope.alerts.receivers.http import post
from stallscope.alerts.state import Delivery

_PRIORITY = {"critical": "P1", "high": "P2", "medium": "P3", "low": "P5"}
_MAX_MESSAGE, _MAX_DESCRIPTION, _MAX_NOTE = 130, 15_000, 25_000


def send(receiver: Opsgenie, delivery: Delivery) -> None:
    """Raises DeliveryFailed."""
    path, body = request(delivery)
    headers = {"Authorization": f"GenieKey {receiver.api_key.value()}"}
    post(f"{receiver.url.rstrip('/')}{path}", body, headers)


def request(delivery: Delivery) -> tuple[str, dict[str, object]]:
    """Path and body. The alias identifies the alert; a repeated creation with it only increases a counter."""
    notice = delivery.notice
    of_alias = f"/v2/alerts/{quote(notice.key, safe='')}"
    if delivery.change == "resolved":
        return f"{of_alias}/close?identifierType=alias", {"source": "stallscope", "note": notice.lines[0]}
    if delivery.change == "updated":
        note = f"Severity {notice.severity}. {notice.text}"[:_MAX_NOTE]
        return f"{of_alias}/notes?identifierType=alias", {"source": "stallscope", "note": note}
    return "/v2/alerts", {
        "message": notice.title[:_MAX_MESSAGE],
        "alias": notice.key,
        "description": notice.text[:_MAX_DESCRIPTION],
        "priority": _PRIORITY[notice.severity],
        "source": "stallscope",
        "entity": ", ".join(notice.nodes)[:512],
        "tags": [tag for tag in ("stallscope", notice.kind, notice.cluster) if tag],
        "details": {"tenant": notice.tenant, "link": notice.link, "severity": notice.severity},
    }
