"""The CPU quota of the process's control group is used up.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="cpu_quota",
    title="was kept off the CPU by the quota of its control group",
    state="kept off the CPU by the quota of its control group",
    noun="CPU quota",
    categories=(),
    advice=lambda _: ["Raise the CPU limit of the container or service, or use fewer threads."],
)
