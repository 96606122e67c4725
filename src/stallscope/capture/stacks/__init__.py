"""Where in the code a thread is: Python and native frames, without a stop, a debugger or the target's own binary."""
