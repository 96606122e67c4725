"""Python and native frames of threads, without a stop, a debugger or the target's own binary."""

from stallscope.capture.stacks.memory import forbidden

__all__ = ["forbidden"]
