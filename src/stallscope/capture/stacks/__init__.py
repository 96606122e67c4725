"""Python and native frames of threads, without a stop, a debugger or the target's own binary."""

from stallscope.capture.stacks.memory import read_restriction

__all__ = ["read_restriction"]
