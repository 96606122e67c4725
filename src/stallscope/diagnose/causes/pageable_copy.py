"""Copies between the GPU and memory that is not pinned: they are staged and block the caller.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="pageable_copy",
    title="copied from or to memory that is not pinned",
    state="copying from or to memory that is not pinned",
    noun="copies of memory that is not pinned",
    categories=(),
    advice=lambda _: ["Pin the memory (pin_memory=True) and copy with non_blocking=True."],
)
