"""PagerDuty's Events API v2. Source: https://developer.pagerduty.com/docs/send-alert-event"""

from stallscope.alerts.config import PagerDuty
from stallscope.alerts.receivers.http import post
from stallscope.alerts.state import Delivery
from stallscope.events.clock_text import iso_utc

_SEVERITY = {"critical": "critical", "high": "error", "medium": "warning", "low": "info"}
_MAX_SUMMARY = 1024


def send(receiver: PagerDuty, delivery: Delivery) -> None:
    """Raises DeliveryFailed."""
    post(receiver.url, event(receiver.routing_key.value(), delivery))


def event(routing_key: str, delivery: Delivery) -> dict[str, object]:
    """The request body. A second trigger with the same dedup_key updates the same incident."""
    notice = delivery.notice
    action = "resolve" if delivery.change == "resolved" else "trigger"
    body: dict[str, object] = {"routing_key": routing_key, "event_action": action, "dedup_key": notice.key}
    if action == "resolve":
        return body
    return body | {
        "client": "stallscope",
        **({"client_url": notice.link} if notice.link else {}),
        "links": [{"href": notice.link, "text": "The page at this moment"}] if notice.link else [],
        "payload": {
            "summary": notice.title[:_MAX_SUMMARY],
            "source": ", ".join(notice.nodes)[:255] or notice.cluster or "stallscope",
            "severity": _SEVERITY[notice.severity],
            "timestamp": iso_utc(notice.begin_ns),
            "component": notice.cluster or None,
            "class": notice.kind,
            "custom_details": {
                "verdict": "\n".join(notice.lines),
                "action": notice.action,
                "tenant": notice.tenant,
                "incidents": list(notice.incidents),
            },
        },
    }
