"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.errors import BadInput

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.settings import Settings

Db = Annotated[
    Path | None, typer.Option("--db", help="The node trace (default: STALLSCOPE_DB or the settings).")
]
HubDb = Annotated[
    Path | None, typer.Option("--db", help="The hub's folder (default: STALLSCOPE_HUB_DB or the settings).")
]
Price = Annotated[float | None, typer.Option("--usd-per-gpu-hour", help="Price of one GPU for one hour.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Rates = Annotated[
    Path | None, typer.Option("--rates", help="File with prices of GPU hours (default: the shipped list).")
]
Alerts = Annotated[
    Path | None, typer.Option("--alerts", help="File with receivers and routes of alerts (docs/alerts.md).")
]
HubUrl = Annotated[
    str, typer.Option("--hub", help="Address of the hub: https://HOST:8081 (http:// for a hub without TLS).")
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the token for the hub.")]
CaFile = Annotated[
    Path | None, typer.Option("--ca-cert", help="Authority that signed the hub's certificate (PEM).")
]
STDOUT = Path("-")
"""The value of an option for an output file that means standard output."""
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", help="File (default: standard output).")]
JobName = Annotated[
    str | None, typer.Option("--job", help="Only this job: its id, or its number or name in the scheduler.")
]
OwnerName = Annotated[
    str | None, typer.Option("--owner", help="Only jobs of this user, account, workload or systemd unit.")
]
NamespaceName = Annotated[str | None, typer.Option("--namespace", help="Only jobs in this namespace.")]
SettingsFile = Annotated[Path | None, typer.Option("--settings", help="Settings file (YAML).")]


def settings_from(flags: Mapping[str, object], path: Path | None) -> Settings:
    """The effective settings. flags: by setting name, None for flags that were not given; path: the settings file."""
    from stallscope.settings import effective

    return effective(flags, os.environ, path).settings


def check_output(out: Path | None, inputs: Iterable[Path]) -> None:
    """Raises BadInput for an output that would replace an input of the command."""
    for path in inputs:
        if out and out.exists() and path.exists() and out.samefile(path):
            raise BadInput(f"cannot write {out}: this command reads it; choose another path")


def price_flags(
    usd_per_gpu_hour: float | None, gpu: str | None, provider: str | None, rates: Path | None
) -> dict[str, object]:
    """The options of the price by setting name. Raises BadInput for a price and a list to look it up in."""
    listed = {"--gpu": gpu, "--provider": provider, "--rates": rates}
    if usd_per_gpu_hour is not None and (unused := [option for option, value in listed.items() if value]):
        raise BadInput(
            f"--usd-per-gpu-hour is the price itself, so {unused[0]} has no effect with it; give only one"
        )
    return {"usd_per_gpu_hour": usd_per_gpu_hour, "gpu": gpu, "provider": provider, "rates": rates}


def check_pair(cert: Path | None, key: Path | None) -> None:
    """Raises BadInput for a client certificate without its key, or a key without its certificate."""
    if bool(cert) != bool(key):
        raise BadInput("--client-cert and --client-key belong together; give both")


def check_no_hub_options(token_file: Path | None, ca_cert: Path | None, *, needs: str) -> None:
    """Raises BadInput for a hub's token or authority where no hub is queried. needs: the missing option."""
    for option, value in {"--token-file": token_file, "--ca-cert": ca_cert}.items():
        if value is not None:
            raise BadInput(f"{option} has no effect without {needs}; give {needs}, or omit {option}")


def check_grpc_address(text: str, option: str) -> None:
    """Raises BadInput unless the text is HOST:PORT; a URL gets the address that it may mean."""
    if "://" in text:
        named = re.match(r"[^:]*://([\w.-]+)(?::\d+)?(?:/|$)", text)
        name = named[1] if named else "hub.example"
        raise BadInput(
            f"{option}: {text!r} is a URL; rows are sent by OTLP over gRPC: give HOST:PORT, such as {name}:4317"
        )
    host, _, port = text.rpartition(":")
    if not host or "@" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadInput(f"{option}: {text!r} is not HOST:PORT; give for example hub.example:4317")


def duration_ns(text: str, option: str) -> int:
    """Nanoseconds of durations such as "90s" or "5m", up to 100 years; a number without a unit is in seconds."""
    from stallscope.settings import LONGEST_S, duration_s

    try:
        seconds = duration_s(text)
    except ValueError:
        seconds = 0.0
    if seconds < 1e-9:
        raise BadInput(f"{option}: {text[:80]!r} is not a duration; give for example 30s, 5m or 2h")
    if seconds > LONGEST_S:
        raise BadInput(f"{option}: {text[:80]!r} is longer than 100 years; give for example 30s, 5m or 2h")
    return int(seconds * 1e9)
