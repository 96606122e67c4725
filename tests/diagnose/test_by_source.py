"""The report on several sources of one job."""

from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.verdicts.by_source import joint
from stallscope.events.verdict_fields import KINDS


def report(kind: str, rank: int) -> Report:
    verdict = Verdict(kind=kind, summary=f"{kind} of rank {rank}", ranks=[rank])
    return Report(source="files", examined={"n_ranks": 4}, verdicts=[verdict])


def test_the_joint_report_begins_with_the_most_urgent_kind():
    for kind in KINDS[1:]:
        joined = joint([report(kind, 1), report("failure", 2)])
        assert joined.verdicts[0].kind == "failure"
        remarks = {remark["what"] for remark in joined.benign}
        summary = f"{kind} of rank 1"
        assert {summary, f"secondary: {summary}"} & {*remarks, *(each.summary for each in joined.verdicts)}
