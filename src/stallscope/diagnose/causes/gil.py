"""The GPU thread waits for Python's interpreter lock.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="gil",
    title="waited for Python's interpreter lock",
    state="waiting for Python's interpreter lock",
    noun="Python's interpreter lock",
    categories=(),
    advice=lambda _: [
        "Move the holder's work into another process, or into code that releases the interpreter lock."
    ],
)
