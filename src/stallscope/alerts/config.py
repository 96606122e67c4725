"""alerts.yaml: the receivers of alerts, and the routes that decide which incidents reach them.

Secrets are never in the file: it names another file or an environment variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from stallscope.errors import BadInput, NotFound, yaml_complaint
from stallscope.events.verdict_fields import KINDS, SEVERITIES

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

GroupField = Literal["incident", "cluster", "node", "kind"]


def _seconds(value: object) -> object:
    """Seconds of `30s`, `5m`, `2h`, `7d`; a number is in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", str(value).strip())
    if isinstance(value, bool) or not match:
        raise ValueError(f"{value!r} is not a duration; give for example 30s, 5m or 2h")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def _words(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _clock(value: object) -> object:
    """A time of day. YAML 1.1 reads an unquoted 22:00 as a number to base 60."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1440:
        return time(value // 60, value % 60)
    try:
        return time.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f'{value!r} is not a time of day; give for example "22:00"') from None


Seconds = Annotated[float, BeforeValidator(_seconds)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Clock = Annotated[time, BeforeValidator(_clock)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Secret(_Part):
    """A secret in a file or in an environment variable; exactly one of them."""

    file: Path | None = None
    env: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_literal(cls, value: object) -> object:
        if isinstance(value, str):  # the value itself must not appear in a message
            raise ValueError("a secret is not written here; give {file: PATH} or {env: VARIABLE}")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Secret:
        if (self.file is None) == (self.env is None):
            raise ValueError("give either file or env")
        return self

    def value(self, environ: Mapping[str, str] = os.environ) -> str:
        """The secret, read at each use. Raises NotFound without the secret in its message."""
        try:
            text = self.file.read_text(encoding="utf-8") if self.file else environ[self.env or ""]
        except (OSError, UnicodeDecodeError, KeyError):
            text = ""
        if not text.strip():
            source = f"file {self.file}" if self.file else f"environment variable {self.env}"
            raise NotFound(f"the {source} is empty; write the secret into it")
        return text.strip()


class Slack(_Part):
    """Slack's incoming webhook."""

    type: Literal["slack"]
    url: Secret


class PagerDuty(_Part):
    """PagerDuty's Events API v2."""

    type: Literal["pagerduty"]
    routing_key: Secret
    url: str = "https://events.pagerduty.com/v2/enqueue"


class Opsgenie(_Part):
    """Opsgenie's Alert API v2. url: https://api.eu.opsgenie.com for accounts in Europe."""

    type: Literal["opsgenie"]
    api_key: Secret
    url: str = "https://api.opsgenie.com"


class Alertmanager(_Part):
    """Alertmanager's API v2. token: for a server behind a proxy that requires one."""

    type: Literal["alertmanager"]
    url: str
    token: Secret | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class Email(_Part):
    """SMTP. starttls: upgrade the connection, refuse a server that cannot."""

    type: Literal["email"]
    host: str
    port: int = Field(default=587, ge=1, le=65535)
    starttls: bool = True
    username: str | None = None
    password: Secret | None = None
    sender: str = Field(alias="from")
    to: Words


class Webhook(_Part):
    """CloudEvents 1.0 in JSON. key: signs the body with HMAC-SHA256."""

    type: Literal["webhook"]
    url: str
    key: Secret | None = None


Receiver = Annotated[
    Slack | PagerDuty | Opsgenie | Alertmanager | Email | Webhook, Field(discriminator="type")
]


class Match(_Part):
    """Conditions on an incident; an empty condition accepts every value. Names may contain * and ?.

    job: its number or name in the scheduler. owner: user, account, workload of Kubernetes or systemd unit. namespace:
    of Kubernetes. An incident without a known owner has none of the three.
    """

    severity: Annotated[tuple[Literal[SEVERITIES], ...], BeforeValidator(_words)] = ()  # type: ignore[valid-type]
    kind: Annotated[tuple[Literal[KINDS], ...], BeforeValidator(_words)] = ()  # type: ignore[valid-type]
    tenant: Words = ()
    cluster: Words = ()
    node: Words = ()
    job: Words = ()
    owner: Words = ()
    namespace: Words = ()


class QuietHours(_Part):
    """Alerts wait until the end of the quiet hours. except_severity: not delayed."""

    begin: Clock = Field(alias="from")
    end: Clock = Field(alias="to")
    days: Annotated[tuple[Literal[_DAYS], ...], BeforeValidator(_words)] = _DAYS  # type: ignore[valid-type]
    zone: str = "UTC"
    except_severity: Annotated[tuple[Literal[SEVERITIES], ...], BeforeValidator(_words)] = ("critical",)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _known_zone(self) -> QuietHours:
        try:
            ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ValueError(f"{self.zone!r} is not a time zone; give for example Europe/Berlin") from None
        return self

    def contains(self, now_s: float) -> bool:
        """Whether the moment is within the quiet hours. Hours past midnight belong to the day they begin on."""
        local = datetime.fromtimestamp(now_s, UTC).astimezone(ZoneInfo(self.zone))
        today, yesterday = _DAYS[local.weekday()], _DAYS[(local.weekday() - 1) % 7]
        clock = local.time()
        if self.begin <= self.end:
            return today in self.days and self.begin <= clock < self.end
        return (today in self.days and clock >= self.begin) or (yesterday in self.days and clock < self.end)


class Route(_Part):
    """Where matching incidents go. continue: also try the routes below."""

    match: Match = Match()
    receivers: Words
    min_duration: Seconds = 0.0
    min_gpu_seconds: float = Field(default=0.0, ge=0)
    min_usd: float = Field(default=0.0, ge=0)
    group_by: Annotated[tuple[GroupField, ...], BeforeValidator(_words)] = ("incident",)
    quiet_hours: QuietHours | None = None
    continues: bool = Field(default=False, alias="continue")


class Config(_Part):
    """The whole file. page_url: address of the hub's page, for links. resolve_after: an incident that opens again
    within this time stays the same alert.
    """

    page_url: str = ""
    resolve_after: Seconds = 30.0
    receivers: dict[str, Receiver]
    routes: tuple[Route, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _known_receivers(self) -> Config:
        for number, route in enumerate(self.routes, 1):
            for name in route.receivers:
                if name not in self.receivers:
                    known = ", ".join(sorted(self.receivers)) or "none"
                    raise ValueError(
                        f"route {number} names the receiver {name!r}; the receivers are: {known}"
                    )
        return self


def load(path: Path) -> Config:
    """The file's content. Raises NotFound, or BadInput that names the key and the remedy, never a secret."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{path}: the alerts file does not exist; name another with --alerts") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: the alerts file cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{path}: not valid YAML ({yaml_complaint(error)})") from error
    return validated(data, str(path))


def validated(data: Any, origin: str) -> Config:
    """The configuration of parsed YAML. Raises BadInput for the first wrong key."""
    if not isinstance(data, dict):
        raise BadInput(f"{origin}: an alerts file has the keys receivers and routes")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        location, message = first_complaint(error)
        path = ".".join(part for part in location if part not in _TYPES)
        if error.errors()[0]["type"] == "extra_forbidden":
            message = "unknown key; docs/alerts.md lists the keys"
        raise BadInput(f"{origin}: {path + ': ' if path else ''}{message}") from None


def first_complaint(error: ValidationError) -> tuple[list[str], str]:
    """The location and the message of the first wrong value, without the value, which may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    return [str(part) for part in first["loc"]], first["msg"].removeprefix("Value error, ")


_TYPES = frozenset({"slack", "pagerduty", "opsgenie", "alertmanager", "email", "webhook"})
