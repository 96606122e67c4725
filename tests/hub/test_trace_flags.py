"""`stallscope trace --hub`: missing or wrong options are reported before tracing starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stallscope import agent, cli
from stallscope.errors import BadInput


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[agent.Options]:
    """The options the agent would have been started with."""
    observed: list[agent.Options] = []
    monkeypatch.setattr(agent, "trace", lambda options, **_: observed.append(options))
    return observed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hub", "h:4317"], "--token-file"),
        (["--hub", "h", "--token-file", "t"], "HOST:PORT"),
        (["--hub", ":4317", "--token-file", "t"], "HOST:PORT"),
        (["--hub", "h:1", "--token-file", "t", "--hub-insecure", "--ca-cert", "c"], "exclude each other"),
        (["--hub", "h:1", "--token-file", "t", "--client-cert", "c"], "--client-key"),
    ],
)
def test_invalid_hub_flags_are_refused_with_the_required_flag(
    asked: list[agent.Options], words: list[str], expected: str
):
    done = CliRunner().invoke(cli.app, ["trace", "--quiet", *words])
    assert isinstance(done.exception, BadInput)
    assert expected in str(done.exception)
    assert not asked


def test_flags_reach_the_agent(asked: list[agent.Options]):
    words = ["--hub", "h:4317", "--token-file", "t", "--ca-cert", "c", "--cluster", "blue", "--quiet"]
    assert CliRunner().invoke(cli.app, ["trace", *words]).exit_code == 0
    hub = agent.Hub(address="h:4317", token_file=Path("t"), cluster="blue", ca_file=Path("c"))
    assert asked[0].hub == hub


def test_hub_flags_are_not_required_without_a_hub(asked: list[agent.Options]):
    assert CliRunner().invoke(cli.app, ["trace", "--quiet"]).exit_code == 0
    assert asked[0].hub is None
