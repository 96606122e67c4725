"""The standing diagnosis: what arrives at the hub is diagnosed as it comes, and its verdicts are rows like any other.

standing  the thread that feeds the streams and writes verdicts
backlog   what waits to be looked at: a turn for each cluster, and a bound
rows      a change of an incident as rows of the hub
"""

from stallscope.continuous.standing import Standing

__all__ = ["Standing"]
