"""CloudEvents 1.0 in structured JSON. Source: https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md

With a key, the header Stallscope-Signature is `t=<seconds since 1970>,v1=<hex>`: HMAC-SHA256 of `<t>.<body>`.
A repeated delivery of the same change has the same id.
"""

import hashlib
import hmac
import json
import time
from dataclasses import asdict

from stallscope.alerts.config import Webhook
from stallscope.alerts.receivers.http import post
from stallscope.alerts.state import Delivery
from stallscope.events.clock_text import iso_utc


def send(receiver: Webhook, delivery: Delivery) -> None:
    """Raises DeliveryFailed."""
    body = json.dumps(event(delivery)).encode()
    headers = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
    if receiver.key:
        headers["Stallscope-Signature"] = signature(receiver.key.value(), body, round(time.time()))
    post(receiver.url, body, headers)


def event(delivery: Delivery) -> dict[str, object]:
    """The request body."""
    notice = delivery.notice
    data = asdict(notice) | {"begin": iso_utc(notice.begin_ns)}
    data["end"] = None if notice.end_ns is None else iso_utc(notice.end_ns)
    return {
        "specversion": "1.0",
        "id": f"{notice.key}-{delivery.revision}",
        "source": "/stallscope" + (f"/{notice.tenant}" if notice.tenant else ""),
        "type": f"io.stallscope.alert.{delivery.change}",
        "subject": notice.key,
        "time": iso_utc(
            notice.end_ns if delivery.change == "resolved" and notice.end_ns else notice.begin_ns
        ),
        "datacontenttype": "application/json",
        "data": data,
    }


def signature(key: str, body: bytes, at_s: int) -> str:
    """The value of Stallscope-Signature."""
    digest = hmac.new(key.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"
