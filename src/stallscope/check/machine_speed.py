"""Whether this machine is slower than the machines that work on the same job, as the running agent knows it."""

from collections.abc import Iterator
from pathlib import Path

from stallscope.check.finding import Finding, passed, warned
from stallscope.health import state_file


def findings(db: Path) -> Iterator[Finding]:
    """One line if an agent with a hub runs. db: its node trace."""
    saved = state_file.read(db)
    if saved is None or not saved.is_fresh:
        return
    score = "" if saved.score is None else f", score {saved.score:.2f}"
    line = f"{saved.state}{score}: {saved.reason}"
    if saved.state == "straggler":
        yield warned("node health", line, "stallscope explain names the cause; docs/node-health.md")
    else:
        yield passed("node health", line)
