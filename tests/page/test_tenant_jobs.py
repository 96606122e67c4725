"""The page's answers over a store: jobs, cells from memory and from stored rows, rounds, ledgers, silent jobs."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stallscope.errors import NotFound
from stallscope.events.names import CATEGORY_NAMES
from stallscope.page.cells import NO_DATA
from stallscope.page.job_cells import JobMemory, job_id
from stallscope.page.job_list import Jobs
from stallscope.page.matrix import _stored, matrix
from stallscope.page.round_details import late_step, one_round
from stallscope.page.tenant_jobs import Job, _of_row
from stallscope.page.verdict_evidence import evidence, overview
from stallscope.store.hub.store import HubStore

from ..store.hub.rows import appended
from .jobs import COMM, MS, S, arrivals, code_ms, job_row, recent_s, verdict_row

TENANT = "a"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    with closing(HubStore.open(tmp_path)) as opened:
        yield opened


@pytest.fixture
def jobs(store: HubStore) -> Iterator[Jobs]:
    with closing(JobMemory(store)) as memory:
        yield Jobs(store, memory)


def the_job(jobs: Jobs, comm: str = COMM) -> Job:
    assert jobs.memory.wait_until_current()
    job = jobs.table.job(TENANT, job_id("c1", comm))
    assert job is not None
    return job


def add_job(store: HubStore, rows: pa.Table, **fields: Any) -> None:
    """Store the rows of a job, and its row of `jobs`."""
    appended(store, collectives=rows)
    appended(store, jobs=job_row(rows, **fields))


def test_a_job_lists_its_size_rate_and_worst_lateness(store: HubStore, jobs: Jobs):
    begin_s = recent_s()
    add_job(store, arrivals(4, 30, begin_s=begin_s, late_ms={(2, 20): 50.0}))
    job = the_job(jobs)
    (row,) = jobs.rows(TENANT)
    assert (row["job"], row["n_ranks"], row["n_nodes"], row["op"]) == (job.key, 4, 1, "all_reduce")
    assert row["rounds_per_s"] == pytest.approx(2.0, rel=0.05)
    assert row["state"] == "healthy" and max(
        code for code in row["strip"] if code != NO_DATA
    ) == pytest.approx(16 * np.log2(500), abs=1)


def test_a_job_that_the_diagnosis_has_not_examined_is_listed_as_unknown(store: HubStore, jobs: Jobs):
    appended(store, collectives=arrivals(4, 30, begin_s=recent_s()))
    assert jobs.memory.wait_until_current()
    (row,) = jobs.rows(TENANT)
    assert row["state"] == "unknown" and "has not examined" in row["reasons"][0]["reason"]


def test_an_inconclusive_answer_has_its_reasons_and_the_actions_that_would_decide(
    store: HubStore, jobs: Jobs
):
    reasons = [("only 2 steps examined", "Trace at least 20 steps."), ("clocks are apart", "Run chrony.")]
    add_job(store, arrivals(4, 30, begin_s=recent_s()), answer="inconclusive", reasons=reasons)
    (row,) = jobs.rows(TENANT)
    assert row["state"] == "unknown"
    assert [(each["reason"], each["action"]) for each in row["reasons"]] == reasons


def test_unexamined_rows_make_the_state_unknown(store: HubStore, jobs: Jobs):
    add_job(store, arrivals(4, 30, begin_s=recent_s()))
    store.unexamined.add(TENANT, "c1", n_rows=12)
    (row,) = jobs.rows(TENANT)
    assert row["state"] == "unknown" and "12 rows were not examined" in row["reasons"][0]["reason"]


@pytest.mark.parametrize(
    ("age_s", "fields", "state"),
    [
        (20, {}, "healthy"),
        (120, {}, "quiet"),
        (120, {"has_ended": True}, "ended"),
        (20, {"answer": "found"}, "recovered"),
    ],
)
def test_the_state_without_a_verdict_follows_the_table(
    store: HubStore, jobs: Jobs, age_s: int, fields: dict[str, Any], state: str
):
    add_job(store, arrivals(4, 1, begin_s=time.time_ns() // S - age_s), **fields)
    assert [row["state"] for row in jobs.rows(TENANT)] == [state]


def test_a_job_that_ended_long_ago_leaves_the_list_and_its_link_still_opens(store: HubStore, jobs: Jobs):
    rows = arrivals(4, 30, begin_s=time.time_ns() // S - 7200, late_ms={(2, 9): 40.0})
    add_job(store, rows, has_ended=True)
    jobs.memory.wait_until_current()
    jobs.memory._jobs.clear()  # as after a restart: the rows are older than the memory
    jobs.memory._of_process.clear()
    assert jobs.rows(TENANT) == []
    job = the_job(jobs)
    begin_ns = rows["ts_ns"][0].as_py()
    cells = matrix(store, jobs.memory, job, from_ns=begin_ns, to_ns=begin_ns + 15 * S, n=15)
    assert code_ms(int(cells.late[2].max())) == pytest.approx(40, rel=0.03)
    facts = evidence(jobs, job, 2, from_ns=begin_ns, to_ns=begin_ns + 15 * S)
    assert facts["late_step"]["rows"][0]["excess_ms"] == pytest.approx(40.0) and facts["budget"]


def test_an_open_verdict_is_the_state_with_its_loss(store: HubStore, jobs: Jobs):
    add_job(store, arrivals(4, 30, begin_s=recent_s()), answer="found")
    appended(store, verdicts=verdict_row())
    (row,) = jobs.rows(TENANT)
    assert (row["state"], row["rank"], row["cause"], row["late_ms"]) == ("straggler", 2, "block_io", 50.0)
    # 30 to 60 GPU seconds in 60 s
    assert row["gpus_lost"] == [pytest.approx(0.5), pytest.approx(1.0)] and row["usd_per_hour"] is None
    assert row["gpu_seconds_lost"] == [30, 60]


def test_a_silent_hanging_job_stays_in_the_list(store: HubStore, jobs: Jobs):
    old_s = time.time_ns() // S - 3600
    add_job(store, arrivals(16, 3, begin_s=old_s), answer="found")
    appended(
        store, verdicts=verdict_row(kind="hang", rank=5, ranks="[5]", pids="[105]", cause="missing_rank")
    )
    jobs.memory.wait_until_current()
    (row,) = jobs.rows(TENANT)
    assert (row["state"], row["n_ranks"], row["n_nodes"], row["job"]) == ("hang", 16, 2, job_id("c1", COMM))
    assert row["last_ms"] == (old_s * S + 2 * S // 2) // 10**6


def test_a_verdict_of_an_earlier_release_without_a_row_of_its_job_is_listed(store: HubStore, jobs: Jobs):
    appended(store, verdicts=verdict_row(kind="hang"))
    (row,) = jobs.rows(TENANT)
    assert (row["state"], row["n_ranks"], row["job"]) == ("hang", None, job_id("c1", COMM))


def test_a_single_process_is_a_job_of_one_rank_with_its_time_budget(store: HubStore, jobs: Jobs):
    begin_ns = recent_s() * S
    states = [
        {"ts_ns": begin_ns + number * S, "cluster_id": "c1", "node_id": "n7", "pid": 9}
        | {f"{name}_ns": 0 for name in CATEGORY_NAMES}
        | {"on_cpu_ns": 250 * MS * number, "io_ns": 750 * MS * number}
        for number in range(1, 11)
    ]
    appended(store, snapshots=pa.Table.from_pylist(states))
    row = {"job": "n7/9", "cluster_id": "c1", "members": '[["n7", 9, null]]', "n_ranks": 1}
    appended(store, jobs=job_row(arrivals(2, 1, begin_s=recent_s()), **row))
    (listed,) = jobs.rows(TENANT)
    assert (listed["job"], listed["n_ranks"], listed["strip"]) == ("c1:n7/9", 1, None)
    job = jobs.table.job(TENANT, "c1:n7/9")
    assert job is not None
    facts = evidence(jobs, job, 0, from_ns=None, to_ns=None)
    assert [(part["category"], part["share"]) for part in facts["budget"]] == [("io", 0.75), ("on_cpu", 0.25)]
    assert (facts["node"], facts["pid"], facts["ledger"]) == ("n7", 9, [])


def test_the_owner_of_a_job_is_listed_by_label():
    job = the_job_of({"owner_user": "ada", "owner_account": None})
    assert job.owner == {"user": "ada"}


def the_job_of(columns: dict[str, object]) -> Job:
    (row,) = job_row(arrivals(4, 2, begin_s=recent_s())).to_pylist()
    return _of_row(TENANT, row | columns)


def test_worst_jobs_come_first(store: HubStore, jobs: Jobs):
    for number, cluster in enumerate(("fine", "late", "hung")):
        add_job(store, arrivals(4, 30, begin_s=recent_s(), cluster=cluster, comm=f"{number:016x}"))
    late = {"cluster_id": "late", "comm_hash": f"{1:016x}", "verdict_id": "v1"}
    hung = {"cluster_id": "hung", "comm_hash": f"{2:016x}", "verdict_id": "v2", "kind": "hang"}
    appended(store, verdicts=verdict_row(**late))
    appended(store, verdicts=verdict_row(**hung))
    assert [row["cluster"] for row in jobs.rows(TENANT)] == ["hung", "late", "fine"]


def test_communicators_of_the_processes_of_a_job_are_one_row(store: HubStore, jobs: Jobs):
    begin_s = recent_s()
    whole = arrivals(4, 4, begin_s=begin_s)
    half = arrivals(2, 30, begin_s=begin_s, comm="00000000000000bb", ranks=(2, 3), late_ms={(3, 5): 30.0})
    other = arrivals(2, 4, begin_s=begin_s, comm="00000000000000cc", first_pid=900)
    for rows in (half, whole, other):
        appended(store, collectives=rows)
    appended(store, jobs=job_row(whole))
    job = the_job(jobs)
    assert job is the_job(jobs, "00000000000000bb") and job.id == COMM
    assert sorted(row["state"] for row in jobs.rows(TENANT)) == ["healthy", "unknown"]
    cells = matrix(store, jobs.memory, job, from_ns=(begin_s + 2) * S, to_ns=(begin_s + 3) * S, n=1)
    assert code_ms(int(cells.late[3, 0])) == pytest.approx(30, rel=0.03)
    assert cells.comms[cells.comm[0]] == "00000000000000bb" and cells.seq[0] == 5


def test_jobs_that_merge_repeatedly_keep_all_their_communicators(store: HubStore, jobs: Jobs):
    begin_s = recent_s()
    groups = {f"00000000000000{number:02d}": (number, number + 1) for number in (10, 12, 14, 11, 13)}
    for comm, ranks in groups.items():
        appended(store, collectives=arrivals(2, 4, begin_s=begin_s, comm=comm, ranks=ranks))
    assert jobs.memory.wait_until_current()
    (job,) = jobs.memory.jobs(TENANT)
    assert all(jobs.memory.job(TENANT, "c1", comm) is job for comm in groups)
    assert set(job.comms) == set(groups) and set(job.processes) == set(range(10, 16))


def test_a_small_job_becomes_part_of_a_large_job(store: HubStore, jobs: Jobs):
    """Otherwise each of many small jobs would move all keys of the large job."""
    begin_s, small = recent_s(), "00000000000000bb"
    appended(store, collectives=arrivals(4, 4, begin_s=begin_s))
    appended(store, collectives=arrivals(2, 4, begin_s=begin_s, comm=small, ranks=(8, 9)))
    assert jobs.memory.wait_until_current()
    large = jobs.memory.job(TENANT, "c1", COMM)
    appended(store, collectives=arrivals(2, 4, begin_s=begin_s, ranks=(3, 8)))
    assert jobs.memory.wait_until_current()
    assert jobs.memory.jobs(TENANT) == [large]
    assert jobs.memory.job(TENANT, "c1", small) is large
    assert set(large.processes) == {0, 1, 2, 3, 8, 9}


def test_a_job_that_was_merged_is_forgotten_with_all_its_keys(store: HubStore):
    begin_s, now_s = recent_s(), [0.0]
    with closing(JobMemory(store, clock_s=lambda: now_s[0])) as memory:
        for comm, ranks in {"00000000000000bb": (0, 1), "00000000000000dd": (2, 3), COMM: (1, 2)}.items():
            appended(store, collectives=arrivals(2, 4, begin_s=begin_s, comm=comm, ranks=ranks))
        assert memory.wait_until_current()
        assert len(memory.jobs(TENANT)) == 1
        now_s[0] = 10_000.0
        appended(store, collectives=arrivals(2, 4, begin_s=begin_s, comm="00000000000000cc", ranks=(7, 8)))
        assert memory.wait_until_current()
        assert len(memory._jobs) == 1
        assert len(memory._of_process) == 2


def test_another_tenant_sees_no_job(store: HubStore, jobs: Jobs):
    add_job(store, arrivals(4, 30, begin_s=recent_s()))
    key = the_job(jobs).key
    assert jobs.rows("b") == [] and jobs.table.job("b", key) is None


def test_cells_from_memory_equal_cells_from_stored_rows(store: HubStore, jobs: Jobs):
    begin_s = recent_s()
    late = {(2, number): 10.0 + number for number in range(0, 24, 3)}
    add_job(store, arrivals(8, 24, begin_s=begin_s, late_ms=late, missing=[(5, 7)]))
    job = the_job(jobs)
    with jobs.memory.reading():
        job.cells.ring.settle(time.monotonic() + 60)  # the incomplete round
    window = {"from_ns": begin_s * S, "to_ns": (begin_s + 12) * S, "n": 12}
    in_memory, stored = matrix(store, jobs.memory, job, **window), _stored(store, job, *window.values())
    assert np.array_equal(in_memory.late, stored.late) and np.array_equal(in_memory.wait, stored.wait)
    has_late = in_memory.late.max(axis=0) > 0  # of equal arrivals either round may be named
    assert in_memory.seq[has_late].tolist() == stored.seq[has_late].tolist() and has_late.sum() == 8
    assert (in_memory.late != NO_DATA).all()


def test_a_coarse_window_shows_the_maximum_of_its_seconds(store: HubStore, jobs: Jobs):
    begin_s = recent_s()
    add_job(store, arrivals(4, 24, begin_s=begin_s, late_ms={(2, 9): 40.0}))
    job = the_job(jobs)
    cells = matrix(store, jobs.memory, job, from_ns=begin_s * S, to_ns=(begin_s + 12) * S, n=2)
    assert code_ms(int(cells.late[2, 0])) == pytest.approx(40, rel=0.03) and cells.seq[0] == 9
    assert cells.bucket_ns == 6 * S


def test_memory_is_filled_from_the_store_after_a_restart(store: HubStore):
    begin_s = recent_s()
    add_job(store, arrivals(4, 24, begin_s=begin_s, late_ms={(2, 9): 40.0}))
    with closing(JobMemory(store)) as memory:
        assert memory.wait_until_current()
        job = memory.job(TENANT, "c1", COMM)
        assert job is not None
        assert code_ms(int(job.ring.window(begin_s + 4, 1).late[2, 0])) == pytest.approx(40, rel=0.03)


def test_a_round_has_each_arrival_and_the_missing_ranks(store: HubStore, jobs: Jobs):
    rows = arrivals(4, 10, begin_s=recent_s(), late_ms={(2, 5): 50.0}, missing=[(1, 6)])
    add_job(store, rows)
    job = the_job(jobs)
    answer = one_round(store, job, comm=COMM, seq=5)
    assert answer["ranks"] == [0, 1, 2, 3] and answer["arrival_us"] == [0, 0, 50_000, 0]
    assert answer["ledger_us"]["io"] == [0, 0, 50_000, 0] and answer["missing"]["n"] == 0
    hung = one_round(store, job, comm=COMM, seq=6)
    assert hung["missing"] == {"n": 1, "first": [1]} and hung["arrival_us"][1] is None
    with pytest.raises(NotFound):
        one_round(store, job, comm=COMM, seq=99)


def test_the_ledger_of_a_late_step_begins_at_the_last_round_in_time(store: HubStore, jobs: Jobs):
    """A step of seven rounds: rank 2 waits for a disk before the first, and is late in all seven."""
    late = {(2, number): 120.0 for number in range(20, 27)}
    rows = arrivals(4, 40, begin_s=recent_s(), late_ms=late)
    add_job(store, rows)
    step = late_step(store, the_job(jobs), rank=2, comm=COMM, seq=26)
    assert step is not None and (step["from_seq"], step["to_seq"]) == (19, 20)
    assert step["rows"][0]["category"] == "io" and step["rows"][0]["excess_ms"] == pytest.approx(120.0)
    assert step["late_ms"] == pytest.approx(120.0) and step["n_peers"] == 3
    assert late_step(store, the_job(jobs), rank=2, comm=COMM, seq=30) is None


def test_the_evidence_is_the_excess_over_the_peers_and_the_budget(store: HubStore, jobs: Jobs):
    late = {(2, number): 100.0 for number in range(1, 30)}
    add_job(store, arrivals(4, 30, begin_s=recent_s(), late_ms=late))
    facts = evidence(jobs, the_job(jobs), 2, from_ns=None, to_ns=None)
    assert facts["node"] == "node-0" and facts["n_rounds"] == 30
    by_name = {row["category"]: row for row in facts["ledger"]}
    assert by_name["io"]["excess_ms"] == pytest.approx(100.0)
    assert by_name["wait_gpu"]["excess_ms"] == pytest.approx(-100.0)
    shares = {row["category"]: row["share"] for row in facts["budget"]}
    # Of 500 ms a round: 400 on the CPU; 100 in I/O for one rank of four, waiting for three.
    assert shares["on_cpu"] == pytest.approx(0.8, abs=0.01) and shares["io"] == pytest.approx(0.05, abs=0.005)
    assert facts["late_step"]["late_ms"] == pytest.approx(100.0)


def test_lists_that_grow_with_ranks_are_bounded_and_counted(store: HubStore, jobs: Jobs):
    add_job(store, arrivals(8, 30, begin_s=recent_s()))
    ranks = list(range(832))
    whole = {"causes": [{"cause": "missing_rank", "share": 1.0, "evidence": {"doing": ranks}}]}
    row = verdict_row(
        kind="hang", ranks=json.dumps(ranks), victims=json.dumps(ranks), verdict=json.dumps(whole), pids="[]"
    )
    appended(store, verdicts=row)
    job = the_job(jobs)
    answer = overview(jobs, TENANT, job.key)
    assert answer["verdict"]["ranks"] == [0, 1, 2, "and 829 more"]
    assert (answer["verdict"]["n_victims"], answer["verdict"]["n_ranks_named"]) == (832, 832)
    assert answer["verdict"]["causes"][0]["evidence"]["doing"] == [0, 1, 2, "and 829 more"]
    assert len(json.dumps(answer)) < 6000


def test_a_verdict_has_the_time_of_its_last_confirmation(store: HubStore, jobs: Jobs):
    add_job(store, arrivals(4, 30, begin_s=recent_s()))
    appended(store, verdicts=verdict_row())
    the_job(jobs)
    confirmed = Jobs(store, jobs.memory, lambda tenant: {"v1": 1_800_000_000 * S})
    assert confirmed.rows(TENANT)[0]["confirmed_ms"] == 1_800_000_000 * 1000
