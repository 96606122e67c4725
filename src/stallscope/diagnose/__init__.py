"""From events to verdicts: pure functions on arrays.

engine.diagnose() runs the steps on a whole trace, Stream runs them on arriving events. The packages in the order of
the data: timeline, lateness, cost, hangs, gpu, processes and spans detect faults; findings collects the faults;
verdicts turns them into verdicts; report holds verdicts as data and text.

Other parts import this module, and the names that arrays, timeline, processes and views export: no inner files.
"""

from stallscope.diagnose.causes import all_causes
from stallscope.diagnose.engine import can_diagnose, diagnose, has_calls, standstill
from stallscope.diagnose.evidence_fields import without_old_names
from stallscope.diagnose.report import text
from stallscope.diagnose.report.budget import LABELS, budget
from stallscope.diagnose.report.comparison import Measures, compared, measures
from stallscope.diagnose.report.row import json_row, verdict_row
from stallscope.diagnose.report.verdict import (
    Answer,
    Report,
    Verdict,
    VerdictCost,
    as_json,
    verdict_as_json,
    wall_text,
)
from stallscope.diagnose.stream import (
    NO_MORE_EVENTS,
    SKIPPED,
    TRACE_ENDED,
    Change,
    JobState,
    Member,
    Numbering,
    Retention,
    Stream,
)
from stallscope.diagnose.thresholds import Thresholds, thresholds_of
from stallscope.diagnose.verdicts._owners import common_owner, owners_of
from stallscope.diagnose.verdicts.by_source import joint
from stallscope.diagnose.verdicts.gpu_arrival import is_undecided
from stallscope.diagnose.verdicts.held_gpus import IdleHolder, idle_holders

__all__ = [
    "LABELS",
    "NO_MORE_EVENTS",
    "SKIPPED",
    "TRACE_ENDED",
    "Answer",
    "Change",
    "IdleHolder",
    "JobState",
    "Measures",
    "Member",
    "Numbering",
    "Report",
    "Retention",
    "Stream",
    "Thresholds",
    "Verdict",
    "VerdictCost",
    "all_causes",
    "as_json",
    "budget",
    "can_diagnose",
    "common_owner",
    "compared",
    "diagnose",
    "has_calls",
    "idle_holders",
    "is_undecided",
    "joint",
    "json_row",
    "measures",
    "owners_of",
    "standstill",
    "text",
    "thresholds_of",
    "verdict_as_json",
    "verdict_row",
    "wall_text",
    "without_old_names",
]
