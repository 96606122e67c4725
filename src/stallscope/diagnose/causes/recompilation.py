"""The process compiles code repeatedly: torch.compile, Triton, nvcc.

Found in the time budget of one process (diagnose/processes), so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause

CAUSE = Cause(
    name="recompilation",
    title="compiled code repeatedly",
    state="compiling code",
    noun="compilation",
    categories=(),
    advice=lambda _: [
        "Keep the shapes constant (TORCH_LOGS=recompiles prints the reasons), and cache the compiled code."
    ],
)
