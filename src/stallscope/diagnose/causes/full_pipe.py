"""The process writes to a pipe that is full because its reader is slow.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="full_pipe",
    title="wrote to a full pipe",
    state="writing to a full pipe",
    noun="full pipe",
    categories=(),
    advice=lambda _: [
        "Write less, or write from a separate thread; check why the reader of the pipe is slow."
    ],
)
