"""From events to verdicts: pure functions on arrays.

engine.diagnose() runs the steps on a whole trace, Stream runs them on arriving events. The packages in the order of
the data: timeline, lateness, cost, hangs, gpu, processes and spans detect faults; findings collects the faults;
verdicts turns them into verdicts; report holds verdicts as data and text.
"""

from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.report.verdict import (
    Report,
    Verdict,
    VerdictCost,
    as_json,
    verdict_as_json,
    wall_text,
)
from stallscope.diagnose.stream import Change, Retention, Stream
from stallscope.diagnose.thresholds import Thresholds

__all__ = [
    "Change",
    "Report",
    "Retention",
    "Stream",
    "Thresholds",
    "Verdict",
    "VerdictCost",
    "as_json",
    "diagnose",
    "verdict_as_json",
    "wall_text",
]
