"""A house to test in: tokens and an audit log in a folder, and a client of the application."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

from stallscope.serve.app import AppContext, create_app
from stallscope.serve.audit import AuditLog
from stallscope.serve.tokens import Tokens, bearer


@contextmanager
def house_in(folder: Path, **changes: Any) -> Iterator[AppContext]:
    """A context whose tokens and audit log are in a folder."""
    with closing(AuditLog(folder / "audit.jsonl")) as audit:
        yield AppContext(**{"tokens": Tokens(folder / "tokens.json"), "audit": audit} | changes)


def client_of(house: AppContext, *parts: BaseRoute, token: str | None = None) -> httpx.AsyncClient:
    """A client in this process. token: sent with each request."""
    headers = {"Authorization": bearer(token)} if token else {}
    house = replace(house, registry=CollectorRegistry())  # each application counts into its own
    transport = httpx.ASGITransport(create_app(parts, context=house))
    return httpx.AsyncClient(transport=transport, base_url="http://hub", headers=headers)


def audited(folder: Path) -> list[dict[str, Any]]:
    """The lines of the audit log."""
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
