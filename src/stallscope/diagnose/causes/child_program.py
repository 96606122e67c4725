"""The process waits for a program that it started: a shell, git, a compiler, nvidia-smi.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="child_program",
    title="waited for a program that it had started",
    state="waiting for a program that it started",
    noun="program that it started",
    categories=(),
    advice=lambda _: [
        "Move the program out of the step: start it in the background, or do its work in the process."
    ],
)
