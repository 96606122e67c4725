"""The process waits for a lock on a file (flock, fcntl).

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="file_lock",
    title="waited for a file lock",
    state="waiting for a file lock",
    noun="file lock",
    categories=(),
    evidence=lambda _: {},
    advice=lambda _: ["Let each process use a file of its own, or hold the lock for a shorter time."],
)
