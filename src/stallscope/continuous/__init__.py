"""The continuous diagnosis: rows that arrive at the hub are diagnosed at once, and the verdicts are stored as rows.

standing  the thread that feeds the streams and writes verdicts
backlog   the rows to examine: a turn for each cluster, and a bound
continued  incidents that keep their id over restarts and gaps
rows      the change of an incident as rows of the hub
"""

from stallscope.continuous.standing import Standing

__all__ = ["Standing"]
