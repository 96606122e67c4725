"""The process compiles code again and again: torch.compile, Triton, nvcc.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="recompilation",
    title="compiled code again and again",
    state="compiling code",
    noun="compilation",
    categories=(),
    evidence=lambda _: {},
    advice=lambda _: [
        "Keep the shapes the same (TORCH_LOGS=recompiles prints the reasons), and cache what is compiled."
    ],
)
