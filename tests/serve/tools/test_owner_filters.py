"""Jobs, verdicts and costs by owner: user, account, namespace, the scheduler's number of the job."""

import pytest
from tests.serve.tools import cluster
from tests.serve.tools.test_jobs import FAST, LATER_NS, OF_FAST, SLOW, job_row, second_job

from stallscope.errors import NotFound
from stallscope.events.owner import column
from stallscope.serve.tools.answer_summary import SummaryParams, summary
from stallscope.serve.tools.find_nccl_processes import ProcessesParams, find_nccl_processes
from stallscope.serve.tools.get_cost import CostParams, get_cost
from stallscope.serve.tools.goodput import GoodputParams, goodput
from stallscope.serve.tools.idle_gpus import IdleParams, idle_gpus
from stallscope.serve.tools.tenant_context import TenantContext
from stallscope.serve.tools.verdict_row import stored_verdicts
from stallscope.serve.tools.verdicts import VerdictsParams, verdicts
from stallscope.store.hub.store import Batch

ANN = {column("user"): "ann", column("account"): "ml", column("job"): "4711", column("job_name"): "train"}
BOB = {column("user"): "bob", column("namespace"): "vision", column("job"): "4712", column("queue"): "night"}
HELD_S = 3600.0


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Ann's job with a straggler, Bob's healthy job with the same ranks, and GPUs that Bob holds without a job."""
    slow = cluster.collectives("alpha")
    fast = second_job(cluster.collectives("alpha", straggler=None))
    jobs = [
        job_row(SLOW, "found", pids_from=1000, begin_ns=cluster.T0_NS) | ANN,
        job_row(FAST, "healthy", pids_from=1000 + OF_FAST, begin_ns=cluster.T0_NS + LATER_NS) | BOB,
    ]
    late = cluster.verdict("alpha").to_pylist()[0] | {"job": SLOW} | ANN
    held = late | BOB | {"verdict_id": "held", "job": None, "gpu_seconds": HELD_S} | {column("job"): "4713"}
    held |= {name: None for name in ANN if name not in BOB}
    with cluster.hub_in(tmp_path_factory.mktemp("hub")) as hub:
        for name, table in (
            ("collectives", slow),
            ("collectives", fast),
            ("jobs", cluster.table("jobs", jobs)),
            ("verdicts", cluster.table("verdicts", [late, held])),
        ):
            hub.store.append(Batch("", "a", {name: table})).result(30)
        yield TenantContext(hub, "a")


def found(context: TenantContext, **chosen: str) -> list[str]:
    return sorted(row["verdict_id"] for row in verdicts(context, VerdictsParams(**chosen)).rows)


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ({"owner": "ann"}, ["alpha-1"]),
        ({"owner": "ml"}, ["alpha-1"]),
        ({"owner": "bob"}, ["held"]),
        ({"namespace": "vision"}, ["held"]),
        ({"namespace": "vision", "owner": "ann"}, []),
        ({"job": "4711"}, ["alpha-1"]),
        ({"job": "train"}, ["alpha-1"]),
        ({"job": "4713"}, ["held"]),
        ({"owner": "it's nobody"}, []),
    ],
)
def test_verdicts_are_chosen_by_owner(context, chosen, ids):
    assert found(context, **chosen) == ids


def test_one_call_of_a_tool_resolves_its_jobs_once(context, monkeypatch):
    asked, job_rows = [], TenantContext.job_rows
    monkeypatch.setattr(
        TenantContext,
        "job_rows",
        lambda self, *given, **more: asked.append(1) or job_rows(self, *given, **more),
    )
    fresh = TenantContext(context.hub, "a")
    choice = VerdictsParams(owner="ann").choice
    for _ in range(5):
        assert [row["verdict_id"] for row in stored_verdicts(fresh, choice=choice, max_rows=9)] == ["alpha-1"]
    assert len(asked) == 1


def test_a_job_that_has_neither_a_row_nor_a_verdict_is_an_error(context):
    with pytest.raises(NotFound, match="no job '9999'"):
        verdicts(context, VerdictsParams(job="9999"))


def test_rows_of_an_owner_are_of_that_owner_s_processes(context):
    (job,) = summary(context, SummaryParams(owner="bob")).jobs
    assert (job.job, job.owner["user"], job.owner["queue"]) == (FAST, "bob", "night")
    pids = {row.pid for row in find_nccl_processes(context, ProcessesParams(namespace="vision")).rows}
    assert pids == {1000 + OF_FAST + rank for rank in range(cluster.N_RANKS)}
    both = {row.pid for row in find_nccl_processes(context, ProcessesParams()).rows}
    assert both == pids | {1000 + rank for rank in range(cluster.N_RANKS)}


def test_costs_are_summed_by_owner(context):
    by_user = {row.owner: row.gpu_seconds for row in get_cost(context, CostParams(by="user")).rows}
    assert by_user == {"ann": pytest.approx(cluster.GPU_SECONDS), "bob": HELD_S}
    by_account = {row.owner: row.gpu_seconds for row in get_cost(context, CostParams(by="account")).rows}
    assert by_account == {"ml": pytest.approx(cluster.GPU_SECONDS), None: HELD_S}
    (row,) = get_cost(context, CostParams(by="queue", owner="bob")).rows
    assert (row.owner, row.gpu_seconds, row.cluster) == ("night", HELD_S, None)


def test_idle_gpus_are_listed_with_owner_and_price(context):
    now_ns = context.hub.now_ns()
    hour_ns = 3_600 * 10**9
    rows = [
        {
            "ts_ns": now_ns - ago_ns,
            "cluster_id": "alpha",
            "node_id": "alpha-node-0",
            "gpu": gpu,
            "since_ns": since_ns,
        }
        | {"holder": holder, "is_idle": is_idle, "reason": "no GPU calls"}
        | BOB
        for holder, gpu, ago_ns, since_ns, is_idle in (
            ("job 1", "0", 10**9, now_ns - 2 * hour_ns, 1),
            ("job 1", "1", 10**9, now_ns - 2 * hour_ns, 1),
            ("job 2", "2", 2 * 10**9, now_ns - hour_ns, 1),
            ("job 2", "2", 10**9, now_ns - hour_ns, 0),
            ("job 3", "3", hour_ns, now_ns - 2 * hour_ns, 1),
        )
    ]
    tables = {"idle_gpus": cluster.table("idle_gpus", rows), "nodes": cluster.machines("alpha")}
    context.hub.store.append(Batch("", "a", tables)).result(30)
    answer = idle_gpus(context, IdleParams())
    (row,) = answer.rows
    assert (row.holder, row.gpus, row.owner["user"], round(row.gpu_hours, 1)) == (
        "job 1",
        ["0", "1"],
        "bob",
        4.0,
    )
    assert answer.usd_per_hour == row.usd_per_hour
    assert row.usd_per_hour > 0
    (model,) = set(tables["nodes"]["gpu_model"].to_pylist())
    (of_model,) = get_cost(context, CostParams(by="gpu_model")).rows
    assert (of_model.gpu_model, of_model.n_incidents, of_model.owner) == (model, 2, None)
    assert idle_gpus(context, IdleParams(owner="ann")).rows == []
    assert idle_gpus(context, IdleParams(namespace="vision", job="4712")).n_gpus == 2


def test_goodput_is_reported_by_owner(context):
    begin_ms = cluster.T0_NS // 10**6
    params = {"from": begin_ms, "to": begin_ms + 3_600_000}
    answer = goodput(context, GoodputParams.model_validate(params | {"by": "user"}))
    rows = {row.group: row for row in answer.rows}
    held_s = cluster.N_RANKS * cluster.N_ROUNDS * cluster.STEP_NS / 1e9
    assert rows["ann"].gpu_hours == pytest.approx(held_s / 3600, abs=1e-4)
    assert rows["ann"].input == pytest.approx(cluster.GPU_SECONDS / 3600, abs=1e-4)
    assert answer.is_complete
    (only,) = goodput(context, GoodputParams.model_validate(params | {"by": "job", "owner": "ann"})).rows
    assert only.group == "4711 (train)"
