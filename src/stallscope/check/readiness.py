"""The list of checks, and their results."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stallscope.check import (
    gpus,
    hub_connection,
    kernel_support,
    libraries,
    machine_speed,
    storage,
    wall_clock,
)
from stallscope.check.finding import Finding, State
from stallscope.settings import Settings


def findings(settings: Settings, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Iterator[Finding]:
    """Every line, as soon as it is known."""
    yield from kernel_support.findings(proc, sys)
    yield from gpus.findings(proc)
    yield from libraries.findings(proc, ignored=frozenset({os.getpid()}))
    yield from wall_clock.findings()
    yield from storage.findings(settings.db, settings.max_db_bytes)
    yield from hub_connection.findings(settings.hub, settings.hub_ca_file, settings.hub_token_file)
    yield from machine_speed.findings(settings.db)


def as_json(results: list[Finding]) -> dict[str, Any]:
    """The results as data; ready: no check fails."""
    return {"ready": is_ready(results), "checks": [asdict(finding) for finding in results]}


def is_ready(results: list[Finding]) -> bool:
    """Whether no check fails."""
    return all(finding.state is not State.FAIL for finding in results)
