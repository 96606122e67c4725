"""Two jobs of one cluster with the same ranks: each tool answers on one of them, and never on a mixture."""

import json

import pyarrow as pa
import pytest
from tests.serve.tools import cluster

from stallscope.errors import NotFound
from stallscope.serve.tools.answer_summary import SummaryParams, summary
from stallscope.serve.tools.explain_rank import ExplainParams, explain_rank
from stallscope.serve.tools.find_nccl_processes import ProcessesParams, find_nccl_processes
from stallscope.serve.tools.get_cost import CostParams, get_cost
from stallscope.serve.tools.tenant_context import TenantContext
from stallscope.serve.tools.verdicts import VerdictsParams, verdicts
from stallscope.store.hub.store import Batch

SLOW, FAST = "00112233aabbccdd", "ffeeddccbbaa9988"
LATER_NS = 50_000_000
OF_FAST = 9000


def second_job(rows: pa.Table) -> pa.Table:
    """The same ranks on the same machines: other processes, another communicator, a little later."""
    plain = [
        row | {"pid": row["pid"] + OF_FAST, "comm_hash": FAST, "ts_ns": row["ts_ns"] + LATER_NS}
        for row in rows.to_pylist()
    ]
    return cluster.table("collectives", plain)


def job_row(job: str, answer: str, *, pids_from: int, begin_ns: int) -> dict[str, object]:
    return {
        "cluster_id": "alpha",
        "job": job,
        "begin_ns": begin_ns,
        "last_ns": begin_ns + cluster.N_ROUNDS * cluster.STEP_NS,
        "n_ranks": cluster.N_RANKS,
        "members": json.dumps(
            [[f"alpha-node-{rank // 4}", pids_from + rank, rank] for rank in range(cluster.N_RANKS)]
        ),
        "answer": answer,
        "reasons": "[]",
        "evidence": json.dumps({"n_steps": cluster.N_ROUNDS}),
    }


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with cluster.hub_in(tmp_path_factory.mktemp("hub")) as hub:
        slow = cluster.collectives("alpha")
        fast = second_job(cluster.collectives("alpha", straggler=None))
        jobs = [
            job_row(SLOW, "found", pids_from=1000, begin_ns=cluster.T0_NS),
            job_row(FAST, "healthy", pids_from=1000 + OF_FAST, begin_ns=cluster.T0_NS + LATER_NS),
        ]
        verdict = cluster.verdict("alpha").to_pylist()[0] | {"job": SLOW}
        for name, table in (
            ("collectives", slow),
            ("collectives", fast),
            ("jobs", cluster.table("jobs", jobs)),
            ("verdicts", cluster.table("verdicts", [verdict])),
        ):
            hub.store.append(Batch("", "a", {name: table})).result(30)
        yield TenantContext(hub, "a")


def test_a_rank_is_explained_within_one_job(context):
    of_slow = explain_rank(context, ExplainParams(cluster="alpha", rank=cluster.STRAGGLER, job=SLOW))
    of_fast = explain_rank(context, ExplainParams(cluster="alpha", rank=cluster.STRAGGLER, job=FAST))
    assert of_slow.rounds.n_rounds == of_fast.rounds.n_rounds == cluster.N_ROUNDS
    assert (round(of_slow.rounds.lag_ms), round(of_fast.rounds.lag_ms)) == (40, 0)
    assert (len(of_slow.verdicts), len(of_fast.verdicts)) == (1, 0)


def test_without_a_job_the_newest_is_explained_and_the_others_are_listed(context):
    answer = explain_rank(context, ExplainParams(cluster="alpha", rank=cluster.STRAGGLER))
    assert (answer.job, answer.rounds.n_rounds) == (FAST, cluster.N_ROUNDS)
    assert SLOW in answer.summary


def test_tools_accept_a_job(context):
    assert {row.pid for row in find_nccl_processes(context, ProcessesParams(job=FAST)).rows} == set(
        range(1000 + OF_FAST, 1000 + OF_FAST + cluster.N_RANKS)
    )
    assert [job.job for job in summary(context, SummaryParams(job=SLOW)).jobs] == [SLOW]
    assert verdicts(context, VerdictsParams(job=FAST)).answer == "healthy"
    assert verdicts(context, VerdictsParams(job=SLOW)).answer == "found"
    assert get_cost(context, CostParams(job=FAST)).summary == "No GPU time was lost to delays."
    with pytest.raises(NotFound, match="no job 'none'"):
        verdicts(context, VerdictsParams(job="none"))
