"""Whether a machine is slower than the machines that work on the same job: signals, cohorts, states.

A machine that was always slow looks normal in its own history. Each agent therefore reports its signals to the hub
every 10 s. The hub answers with the median and the threshold of the cohort: the machines that share the job's largest
communicator. The machine decides by these thresholds whether it is a straggler.

signals      the signals, their meaning and their floors
windows      from captured rows to the signals of 10 s
cohorts      thresholds of cohorts, at the hub
node_state   the state of a machine, with hysteresis
state_file   the state for `stallscope check`
"""

METHOD = "/stallscope.v1.Health/Report"
"""The gRPC method: a report in JSON, answered with thresholds in JSON."""

WINDOW_S = 10
"""Time between two reports."""
