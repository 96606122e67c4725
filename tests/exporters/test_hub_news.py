"""A service prints no status line: the agent notes when the hub refuses data, and when it accepts data again."""

import grpc
import pytest

from stallscope.agent_sinks import HubSink
from stallscope.exporters import hub_channel


class Output:
    """The output to a hub, with a state that the test sets."""

    reason = ""

    def complaint(self) -> str:
        return self.reason


def test_each_change_of_the_hub_is_noted_once():
    output = Output()
    sink = HubSink(output)  # type: ignore[arg-type]
    assert sink.news() == ""
    output.reason = "connection refused"
    assert "accepts no data: connection refused" in sink.news()
    assert sink.news() == ""
    output.reason = ""
    assert sink.news() == "the hub accepts data again"
    assert sink.news() == ""


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (
            grpc.StatusCode.UNAUTHENTICATED,
            "the token is unknown; stallscope hub token create creates a token",
        ),
        (grpc.StatusCode.PERMISSION_DENIED, "token 1 lacks the scope 'ingest' (it has read); create another"),
    ],
)
def test_a_refused_token_names_the_option_of_the_agent(code: grpc.StatusCode, details: str):
    reason = hub_channel._reason(code, details)
    assert reason == f"{details.partition(';')[0]}: --token-file"
