"""get_check: checks whether this machine can be traced."""

from pydantic import Field

from stallscope.assistant.node_context import Detail, Node
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool


class CheckParams(Params):
    detail: Detail = "short"


class Line(Row):
    state: str = Field(description="pass, warn or fail.")
    subject: str
    found: str
    advice: str = Field(description="Recommended action; empty for a passed check.")


class Check(Result):
    summary: str
    is_ready: bool
    lines: list[Line]


def get_check(context: Node, params: CheckParams) -> Check:
    """Whether this machine is ready to be traced: kernel, permissions, driver, libraries, clock. Short: only failed
    checks, each with a recommended action.
    """
    from stallscope.check import readiness

    findings = list(readiness.findings(context.settings))
    wrong = [finding for finding in findings if finding.state != "pass"]
    shown = findings if params.detail == "full" else wrong
    is_ready = readiness.is_ready(findings)
    text = f"{len(findings) - len(wrong)} of {len(findings)} checks pass" + (
        f"; {', '.join(finding.subject for finding in wrong)} do not" if wrong else ""
    )
    lines = [Line(state=str(o.state), subject=o.subject, found=o.found, advice=o.advice) for o in shown]
    return Check(summary=text, is_ready=is_ready, lines=lines)


TOOL: Tool[Node] = Tool("get_check", "Is this machine ready?", get_check)
