"""The GPU's clock is reduced by its power limit or its temperature.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="gpu_throttled",
    title="ran its GPU at a reduced clock",
    state="with its GPU at a reduced clock",
    noun="GPU at a reduced clock",
    categories=(),
    advice=lambda _: [
        "Check the power limit, the cooling and the power supply of this GPU (nvidia-smi -q -d PERFORMANCE)."
    ],
)
