"""run_demo: a simulated job with a known fault, and its diagnosis."""

from typing import Literal

from pydantic import Field

from stallscope.assistant.node_context import Node
from stallscope.demo.scenarios import SCENARIOS, named, simulated
from stallscope.diagnose import diagnose, text
from stallscope.serve.tools.tool_registry import Params, Result, Tool

Name = Literal[
    "incident",
    "cold-start",
    "memcpy-bottleneck",
    "periodic-spike",
    "cpu-contention",
    "gpu-steal",
    "straggler",
    "hang",
]


class DemoParams(Params):
    scenario: Name = Field(default="straggler", description="The simulated fault.")


class Demo(Result):
    summary: str
    answer: str = Field(description="The output of `stallscope explain`.")
    learn: list[str]
    scenarios: dict[str, str] = Field(description="All scenarios.")


def run_demo(context: Node, params: DemoParams) -> Demo:
    """A simulated job with a known fault, and its diagnosis: an example of the answers. It contains no data of this
    machine.
    """
    scenario = named(params.scenario)
    return Demo(
        summary=f"Simulated: {scenario.meaning}.",
        answer=text.report(diagnose(simulated(scenario))),
        learn=list(scenario.learn),
        scenarios={each.name: each.meaning for each in SCENARIOS},
    )


TOOL: Tool[Node] = Tool("run_demo", "A simulated job and its diagnosis", run_demo)
