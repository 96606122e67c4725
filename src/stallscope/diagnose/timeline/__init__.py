"""From events to aligned rounds and steps: clocks, matching, and the excess of each rank over its peers."""

from stallscope.diagnose.timeline.clocks import Clocks, aligned, wall_ns
from stallscope.diagnose.timeline.job_separation import parts
from stallscope.diagnose.timeline.rounds import Rounds, rounds
from stallscope.diagnose.timeline.timeline import Timeline, timeline_of

__all__ = ["Clocks", "Rounds", "Timeline", "aligned", "parts", "rounds", "timeline_of", "wall_ns"]
