"""A hub's page over HTTP for tests: a store that a test fills, tokens, sessions, and the application that listens."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stallscope.alerts.state import AlertState, state_path
from stallscope.page.identity_provider import IdentityProvider
from stallscope.page.page import Page, is_open, opened
from stallscope.page.sessions import Sessions
from stallscope.page.sign_in import SignIn
from stallscope.rates import load
from stallscope.serve import alerts_api
from stallscope.serve.app import AppContext, create_app
from stallscope.serve.audit import AuditLog
from stallscope.serve.hub_api import front
from stallscope.serve.server import RunningServer, bound
from stallscope.serve.tokens import Tokens
from stallscope.settings import Settings
from stallscope.store.hub.store import HubStore

SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


@dataclass
class Served:
    """A running page. store, tokens, page: its parts, for the test to change."""

    url: str
    folder: Path
    store: HubStore
    tokens: Tokens
    sign_in: SignIn
    page: Page
    alerts: AlertState

    def token(self, *scopes: str, tenant: str = "a") -> str:
        return self.tokens.create(scopes or ("read", "sql"), tenant)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    @contextmanager
    def signed_in(self, *scopes: str, tenant: str = "a") -> Iterator[httpx.Client]:
        """A client with a session."""
        with self.client(headers=SAME_ORIGIN) as client:
            answer = client.post("/login", json={"token": self.token(*scopes, tenant=tenant)})
            assert answer.status_code == 200, answer.text
            yield client


@contextmanager
def served(
    folder: Path,
    *,
    port: int = 0,
    provider: IdentityProvider | None = None,
    is_tls: bool = False,
    **changes: Any,
) -> Iterator[Served]:
    """The page of a hub in a folder, without receivers and without the continuous diagnosis."""
    with ExitStack() as stack:
        store = stack.enter_context(closing(HubStore.open(folder)))
        tokens = Tokens(folder / "tokens.json")
        audit = stack.enter_context(closing(AuditLog(folder / "audit.jsonl")))
        sign_in = SignIn(tokens, Sessions(folder / "sessions.json", tokens), is_tls=is_tls, provider=provider)
        page = stack.enter_context(opened(store, sign_in, **changes))
        parts, lifespan = stack.enter_context(front(store, load(Settings().rates), n_workers=1))
        alerts = stack.enter_context(closing(AlertState(state_path(folder))))
        context = AppContext(
            tokens=tokens,
            audit=audit,
            session=sign_in.identity,
            is_open=is_open,
            requests_per_minute=1_000_000,
        )
        routes = [*parts, *alerts_api.routes(alerts, has_receivers=True), *page.routes]
        app = create_app(routes, context=context, lifespan=lifespan)
        listener = stack.enter_context(bound(f"127.0.0.1:{port}", "--api"))
        server = RunningServer(app, listener, context=None, name="api")
        stack.callback(server.stop)
        stack.callback(page.stop)
        yield Served(f"http://127.0.0.1:{server.port}", folder, store, tokens, sign_in, page, alerts)
