"""Single processes: time budget, faults, steps without peers, CUDA errors, exits."""

from stallscope.diagnose.causes.on_host import STOPS, sender
from stallscope.diagnose.processes.exit_reason import end, signal_name

__all__ = ["STOPS", "end", "sender", "signal_name"]
