"""Slack's incoming webhook. Source: https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks

A webhook can only add messages. Each change of an alert is therefore a message of its own.
"""

from stallscope.alerts.config import Slack
from stallscope.alerts.notice import Notice
from stallscope.alerts.receivers.http import post
from stallscope.alerts.state import Delivery

_MARK = {"critical": ":red_circle:", "high": ":large_orange_circle:", "medium": ":large_yellow_circle:"}
_MAX_LENGTH = 3000  # of a text object, see Slack's reference of blocks


def send(receiver: Slack, delivery: Delivery) -> None:
    """Raises DeliveryFailed."""
    post(receiver.url.value(), message(delivery))


def message(delivery: Delivery) -> dict[str, object]:
    """The request body: `text` for notifications, `blocks` for the channel."""
    notice = delivery.notice
    head = f"{delivery.change.capitalize()} ({notice.severity})"
    mark = (
        ":large_green_circle:"
        if delivery.change == "resolved"
        else _MARK.get(notice.severity, ":white_circle:")
    )
    body = "\n".join(_escaped(line) for line in notice.lines)
    blocks = [_section(f"{mark} *{head}* {_escaped(notice.title)}"), _section(body)]
    if notice.action and delivery.change != "resolved":
        blocks.append(_section(f"*Action* {_escaped(notice.action)}"))
    if notice.link:
        blocks.append(_section(f"<{notice.link}|Open the page at this moment>"))
    blocks.append({"type": "context", "elements": [_mrkdwn(_context(notice))]})
    return {"text": f"{head}: {_escaped(notice.title)}"[:_MAX_LENGTH], "blocks": blocks}


def _context(notice: Notice) -> str:
    parts = [f"cluster {notice.cluster}" if notice.cluster else "", notice.key]
    return _escaped(" · ".join(part for part in parts if part))


def _section(text: str) -> dict[str, object]:
    return {"type": "section", "text": _mrkdwn(text)}


def _mrkdwn(text: str) -> dict[str, object]:
    return {"type": "mrkdwn", "text": text[:_MAX_LENGTH]}


def _escaped(text: str) -> str:
    """Slack's control characters, so that a process name cannot mention a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
