"""run_demo: a simulated job with a known fault, and its answer."""

from typing import Literal

from pydantic import Field

from stallscope.assistant.asking import Node
from stallscope.demo.scenarios import SCENARIOS, named, simulated
from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.report import text
from stallscope.serve.tools.registry import Params, Result, Tool

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
    scenario: Name = Field(default="straggler", description="What goes wrong.")


class Demo(Result):
    summary: str
    answer: str = Field(description="As `stallscope explain` prints it.")
    learn: list[str]
    scenarios: dict[str, str] = Field(description="All there are.")


def run_demo(asker: Node, params: DemoParams) -> Demo:
    """A job made up by the simulator, with a fault that is known, and the diagnosis of it: to see what answers look
    like. It says nothing about this machine.
    """
    scenario = named(params.scenario)
    return Demo(
        summary=f"Simulated: {scenario.meaning}.",
        answer=text.report(diagnose(simulated(scenario))),
        learn=list(scenario.learn),
        scenarios={one.name: one.meaning for one in SCENARIOS},
    )


TOOL: Tool[Node] = Tool("run_demo", "A simulated job and its answer", run_demo)
