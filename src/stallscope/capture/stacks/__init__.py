"""Python and native frames of threads, without a stop, a debugger or the target's own binary."""
