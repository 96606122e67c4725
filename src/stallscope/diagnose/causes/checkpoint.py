"""The process saves a checkpoint: it serialises, copies, writes and syncs.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="checkpoint",
    title="saved a checkpoint while the GPU waited",
    state="saving a checkpoint",
    noun="checkpoint",
    categories=(),
    evidence=lambda _: {},
    advice=lambda _: ["Save less often, or asynchronously: copy to pinned memory, write from a thread."],
)
