"""E-mail over SMTP. All messages of an alert are one thread: they refer to the first by its Message-ID (RFC 5322)."""

import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate, parseaddr

from stallscope.alerts.config import Email
from stallscope.alerts.receivers.http import TIMEOUT_S, DeliveryFailed
from stallscope.alerts.state import Delivery


def send(receiver: Email, delivery: Delivery) -> None:
    """Raises DeliveryFailed."""
    try:
        with smtplib.SMTP(receiver.host, receiver.port, timeout=TIMEOUT_S) as server:
            if receiver.starttls:
                server.starttls(context=ssl.create_default_context())
            if receiver.username:
                server.login(receiver.username, receiver.password.value() if receiver.password else "")
            server.send_message(message(receiver, delivery))
    except smtplib.SMTPResponseException as error:
        text = (
            error.smtp_error.decode("utf-8", "replace")
            if isinstance(error.smtp_error, bytes)
            else error.smtp_error
        )
        # RFC 5321: 5yz is a permanent failure, 4yz a transient failure.
        permanent = 500 <= error.smtp_code < 600
        raise DeliveryFailed(
            f"{receiver.host} answered {error.smtp_code}: {text[:200]}", is_permanent=permanent
        ) from None
    except (OSError, smtplib.SMTPException) as error:
        raise DeliveryFailed(f"{receiver.host}:{receiver.port} failed ({error})") from None


def message(receiver: Email, delivery: Delivery) -> EmailMessage:
    """The message."""
    notice = delivery.notice
    domain = parseaddr(receiver.sender)[1].rpartition("@")[2] or "stallscope"
    # A new alert with the key of an ended alert begins a new thread.
    thread = f"<{notice.key}-{notice.begin_ns}@{domain}>"
    out = EmailMessage()
    prefix = "" if delivery.change == "raised" else "Re: "
    out["Subject"] = _one_line(f"{prefix}[stallscope {notice.severity}] {notice.title}")[:250]
    out["From"], out["To"] = receiver.sender, ", ".join(receiver.to)
    out["Date"] = formatdate()
    if delivery.change == "raised":
        out["Message-ID"] = thread
    else:
        out["Message-ID"] = f"<{notice.key}-{notice.begin_ns}-{delivery.revision}@{domain}>"
        out["In-Reply-To"] = out["References"] = thread
    out["Auto-Submitted"] = "auto-generated"
    out.set_content(f"{delivery.change.capitalize()}.\n\n{notice.text}\n")
    return out


def _one_line(text: str) -> str:
    return " ".join(text.split())
