"""The GPU is idle for a part of the time and the host has no fault: the GPU has too little work.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="low_utilisation",
    title="gave its GPU too little work",
    state="with too little work for its GPU",
    noun="too little GPU work",
    categories=(),
    advice=lambda _: ["Enlarge the batch, or let the host run ahead of the GPU."],
)
