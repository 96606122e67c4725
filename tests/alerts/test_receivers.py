"""The request of each receiver, by the vendors' documents (their addresses are in the files of the receivers)."""

import base64
import hashlib
import hmac
import json
import threading
from datetime import datetime
from email import message_from_string
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.alerts.builders import T0_NS, S, incident

from stallscope.alerts.config import Email
from stallscope.alerts.notice import Change, notice
from stallscope.alerts.receivers import alertmanager, email, opsgenie, pagerduty, slack, webhook
from stallscope.alerts.receivers.http import post
from stallscope.alerts.state import Delivery


def delivery(change: Change = "raised", *, revision: int = 1, **values: object) -> Delivery:
    end_s = 60 if change == "resolved" else None
    made = notice("stallscope-1", [incident(end_s=end_s, **values)], "https://hub.example")
    return Delivery(change=change, notice=made, revision=revision, n_failures=0)


def test_notice_has_the_verdict_the_cost_the_action_and_a_link():
    text = delivery().notice.text.splitlines()
    assert text == [
        "Rank 2 (host node-a) slows down the job.",
        "Since 2025-10-09 08:53:20 UTC, still open.",
        "Cause: io, 93% of the delay.",
        "Cost: 120 GPU seconds. Confidence 97%.",
        "Action: Look at the disk of node-a.",
        f"https://hub.example/ui/?incident=v1&at={T0_NS // 1_000_000}",
    ]


def test_pagerduty_event():
    event = pagerduty.event("key", delivery())
    assert (event["routing_key"], event["event_action"], event["dedup_key"]) == (
        "key",
        "trigger",
        "stallscope-1",
    )
    payload = event["payload"]
    assert {"summary", "source", "severity"} <= payload.keys()  # required
    assert payload["severity"] == "error"
    assert len(payload["summary"]) <= 1024
    assert datetime.fromisoformat(payload["timestamp"]).timestamp() == T0_NS / S
    assert pagerduty.event("key", delivery("updated", severity="critical"))["dedup_key"] == "stallscope-1"
    assert pagerduty.event("key", delivery("resolved")) == {
        "routing_key": "key",
        "event_action": "resolve",
        "dedup_key": "stallscope-1",
    }


def test_opsgenie_requests():
    path, body = opsgenie.request(delivery(summary="x" * 500))
    assert (path, body["alias"], body["priority"]) == ("/v2/alerts", "stallscope-1", "P2")
    assert len(body["message"]) == 130
    assert opsgenie.request(delivery("updated"))[0] == "/v2/alerts/stallscope-1/notes?identifierType=alias"
    assert opsgenie.request(delivery("resolved"))[0] == "/v2/alerts/stallscope-1/close?identifierType=alias"


def test_slack_message_escapes_control_characters():
    message = slack.message(delivery(summary="Rank 2 (<!channel> & co) is late."))
    assert message["text"] == "Raised (high): Rank 2 (&lt;!channel&gt; &amp; co) is late."
    assert "<!channel>" not in json.dumps(message)
    assert all(block["type"] in ("section", "context") for block in message["blocks"])
    assert len(message["blocks"]) <= 50


def test_alertmanager_labels_stay_the_same_until_the_end():
    raised = alertmanager.alert(delivery(), {"team": "ml"}, T0_NS)
    updated = alertmanager.alert(delivery("updated", severity="critical"), {"team": "ml"}, T0_NS + S)
    resolved = alertmanager.alert(delivery("resolved"), {"team": "ml"}, T0_NS + 90 * S)
    assert raised["labels"] == updated["labels"] == resolved["labels"]
    assert raised["labels"]["team"] == "ml"
    assert all(raised["labels"].values())
    assert updated["annotations"]["severity"] == "critical"
    assert datetime.fromisoformat(raised["endsAt"]).timestamp() == T0_NS / S + 300
    assert datetime.fromisoformat(resolved["endsAt"]).timestamp() == T0_NS / S + 90


def test_webhook_sends_a_cloud_event_with_a_signature():
    event = webhook.event(delivery())
    assert {"id", "source", "specversion", "type"} <= event.keys()  # required
    assert (event["specversion"], event["type"]) == ("1.0", "io.stallscope.alert.raised")
    assert event["id"] == webhook.event(delivery())["id"] != webhook.event(delivery(revision=2))["id"]
    assert event["data"]["incidents"][0]["verdict_id"] == "v1"
    body = json.dumps(event).encode()
    at, _, value = webhook.signature("secret", body, 1_760_000_000).partition(",")
    assert at == "t=1760000000"
    expected = hmac.new(b"secret", b"1760000000." + body, hashlib.sha256).hexdigest()
    assert value == f"v1={expected}"


def test_messages_of_an_alert_are_one_thread():
    receiver = Email(type="email", host="h", **{"from": "Stallscope <s@example.org>"}, to=("a@example.org",))
    first = message_from_string(email.message(receiver, delivery(summary="a\r\nBcc: x@y")).as_string())
    later = message_from_string(email.message(receiver, delivery("resolved", revision=2)).as_string())
    assert first["Bcc"] is None
    assert later["In-Reply-To"] == later["References"] == first["Message-ID"]
    assert first["Message-ID"] != later["Message-ID"]
    assert later["Subject"].startswith("Re: [stallscope high]")


@pytest.mark.parametrize("kind", ["straggler", "hang", "failure"])
def test_notice_of_a_verdict_without_values_can_be_written(kind):
    empty = dict.fromkeys(
        ("cause", "cause_share", "confidence", "gpu_seconds", "usd", "abstained_because", "since_ns")
    )
    text = delivery(kind=kind, advice=[], nodes=[], ranks=[], **empty).notice.text
    assert "Cause unknown." in text
    assert "Cost: 0 GPU seconds." in text


def test_user_and_password_of_a_url_are_sent_as_basic_authentication():
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        post(f"http://ann:pass%20word@127.0.0.1:{server.server_port}/hook", {})
        thread.join()
    assert seen == ["Basic " + base64.b64encode(b"ann:pass word").decode()]
