"""The store with each journal: rows are committed before they are acknowledged, once each, and sealed without gaps."""

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stallscope.errors import BadInput, NotFound, Overloaded, StorageFailed
from stallscope.store.hub import schema
from stallscope.store.hub.hot import HotRows
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import Batch, HubStore

from ...patience import until
from .conftest import Place
from .rows import NOW_NS, appended, collectives, events, files, maintained, sql, without_commits


def reopened(store: HubStore, place: Place) -> HubStore:
    store.close()
    return place.open()


def n_rows(store: HubStore, table: str = "stored_events", tenant: str = "a") -> int:
    ((n,),) = sql(store, f"SELECT count(*) FROM {table}", tenant)
    return int(str(n))


def test_acknowledged_rows_survive_a_restart(store: HubStore, place: Place):
    appended(store, events=events(["x", "y"]), collectives=collectives([1, 2]))
    again = reopened(store, place)
    with closing(again):
        assert sql(again, "SELECT name FROM stored_events ORDER BY name") == [("x",), ("y",)]
        assert sql(again, "SELECT seq, op, rank FROM collectives ORDER BY seq") == [
            (1, "all_reduce", 0),
            (2, "all_reduce", 0),
        ]


def test_a_batch_that_comes_again_is_stored_once_also_after_a_restart(store: HubStore, place: Place):
    batch = Batch("b-1", "a", {"events": events(["x"])})
    receipts = [store.append(batch).result(30) for _ in range(2)]
    again = reopened(store, place)
    with closing(again):
        receipts.append(again.append(batch).result(30))
        assert [receipt.is_duplicate for receipt in receipts] == [False, True, True]
        assert n_rows(again) == 1


def test_the_ids_of_a_tenant_that_sends_very_many_batches_are_bounded(tmp_path: Path):
    limits = Limits(max_batch_ids=20, maintenance_s=0.02)
    with closing(HubStore.open(tmp_path, limits)) as hub_store:
        appended(hub_store, tenant="b", batch_id="honest", events=events(["x"]))
        for number in range(60):
            appended(hub_store, batch_id=f"b{number}", events=events([f"e{number}"]))
        until(lambda: not hub_store.has_too_many_batch_ids())
        newest = Batch("b59", "a", {"events": events(["e59"])})
        assert hub_store.append(newest).result(30).is_duplicate
        assert hub_store.append(Batch("honest", "b", {"events": events(["x"])})).result(30).is_duplicate
    with closing(HubStore.open(tmp_path, limits)) as again:
        assert not again.has_too_many_batch_ids()
        assert again.append(newest).result(30).is_duplicate


def test_many_rows_and_few_that_are_committed_together_are_there_after_a_restart(
    store: HubStore, place: Place
):
    sizes = [5_000, 1, 2, 3_000, 3]
    seqs = iter(range(sum(sizes)))
    with without_commits(store):
        futures = [
            store.append(
                Batch(f"b{n}", "a", {"collectives": collectives([next(seqs) for _ in range(n)], rank=n)})
            )
            for n in sizes
        ]
    assert [f.result(30).n_rows for f in futures] == sizes
    assert store.counters.commits == 1
    output = "SELECT seq, rank, node_id, op, attrs FROM collectives ORDER BY seq"
    before = sql(store, output)
    assert [row[:2] for row in before] == [
        (seq, n) for seq, n in enumerate(n for n in sizes for _ in range(n))
    ]
    with closing(reopened(store, place)) as again:
        assert sql(again, output) == before


def test_a_commit_does_not_wait_forever_for_an_announced_batch(store: HubStore):
    with store.announced():
        assert store.append(Batch("b", "a", {"events": events(["x"])})).result(30).n_rows == 1
    with pytest.raises(ValueError), store.announced():
        raise ValueError
    assert store.append(Batch("c", "a", {"events": events(["y"])})).result(30).n_rows == 1


def test_the_same_id_of_another_tenant_is_another_batch(store: HubStore):
    for tenant in ("a", "b"):
        assert not store.append(Batch("b-1", tenant, {"events": events(["x"])})).result(30).is_duplicate
    assert n_rows(store, tenant="a") == n_rows(store, tenant="b") == 1


def test_two_of_one_id_that_wait_together_are_stored_once(store: HubStore):
    with without_commits(store):
        futures = [store.append(Batch("b", "a", {"events": events(["x"])})) for _ in range(3)]
    assert sorted(f.result(30).is_duplicate for f in futures) == [False, True, True]
    assert n_rows(store) == 1


def test_a_tenant_sees_its_own_rows_only_sealed_or_hot(store: HubStore):
    appended(store, "a", events=events(["mine"]))
    appended(store, "b", events=events(["theirs"]))
    for _ in range(2):
        assert sql(store, "SELECT name, tenant FROM stored_events", "a") == [("mine", "a")]
        assert store.ask("cluster_summary", tenant="a", params={"cluster": None}).num_rows == 1
        assert store.ask("cluster_summary", tenant="nobody", params={"cluster": None}).num_rows == 0
        store.seal_all()


@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        ("nothing", {"ts_ns": [1]}, "unknown table"),
        ("events", {"ts_ns": [1], "colour": ["red"]}, "no column 'colour'"),
        ("events", {"ts_ns": ["soon"]}, "wrong types"),
        ("events", {"ts_ns": [1], "rank": [1 << 40]}, "wrong types"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_they_wait(
    store: HubStore, table: str, rows: dict, message: str
):
    with pytest.raises(BadInput, match=message):
        store.append(Batch("", "a", {table: pa.table(rows)}))


def test_too_much_that_waits_is_refused_and_the_rest_is_stored(place: Place):
    with closing(place.open(Limits(max_queue_rows=5, retry_after_s=2.5))) as store:
        with without_commits(store):
            future = store.append(Batch("", "a", {"events": events(["x"] * 4)}))
            with pytest.raises(Overloaded) as error:
                store.append(Batch("", "a", {"events": events(["y"] * 4)}))
        assert error.value.retry_after_s == 2.5
        assert future.result(30).n_rows == 4 and n_rows(store) == 4


def test_rows_of_concurrent_writers_are_all_stored(store: HubStore):
    def write(number: int) -> None:
        for i in range(25):
            appended(store, batch_id=f"{number}-{i}", events=events([f"{number}-{i}-{k}" for k in range(25)]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sql(store, "SELECT count(*), count(DISTINCT name) FROM stored_events") == [(5000, 5000)]
    assert store.counters.rows == 5000 and store.counters.commits <= 200


def test_sealing_changes_no_answer(store: HubStore, place: Place):
    appended(store, events=events(["x", "y"]), collectives=collectives([1, 2, 3]))
    question = "SELECT * EXCLUDE (received_at) FROM events ORDER BY ts_ns, name"
    before = sql(store, question)
    store.seal_all()
    assert [p.parent.name for p in files(store)].count("stored_events") == 0
    assert {path.parent.name for path in files(store)} == {"events", "collectives"}
    assert store.snapshot("a").hot.keys() == set(schema.KEPT)
    assert sql(store, question) == before
    appended(store, events=events(["z"]))
    assert n_rows(store) == 3
    again = reopened(store, place)
    with closing(again):
        assert n_rows(again) == 3 and n_rows(again, "collectives") == 3


def test_rows_that_come_while_a_file_is_written_stay_hot(store: HubStore, monkeypatch: pytest.MonkeyPatch):
    keeper = store._compactor
    sealed = keeper._sealer.sealed

    def slowly(*args: object, **named: object) -> object:
        appended(store, events=events(["while sealing"]))
        return sealed(*args, **named)

    monkeypatch.setattr(keeper._sealer, "sealed", slowly)
    appended(store, events=events(["before"]))
    store.seal_all()
    assert sql(store, "SELECT name FROM stored_events ORDER BY name") == [("before",), ("while sealing",)]
    assert store.snapshot("a").hot["events"].num_rows == 1


def test_lateness_is_set_when_the_round_is_complete_and_only_then(store: HubStore):
    appended(store, collectives=collectives([1, 2, 3], rank=0, nranks=3))
    appended(store, collectives=collectives([1, 2, 3], rank=1, nranks=3))
    appended(store, collectives=collectives([1, 2], rank=2, nranks=3, late_ns=7_000_000))
    store.seal_all()
    assert sql(store, "SELECT rank, seq, late_ns FROM collectives ORDER BY rank, seq") == [
        (0, 1, 0),
        (0, 2, 0),
        (0, 3, None),
        (1, 1, 0),
        (1, 2, 0),
        (1, 3, None),
        (2, 1, 7_000_000),
        (2, 2, 7_000_000),
    ]


def test_a_round_that_is_sealed_in_two_parts_keeps_its_median(store: HubStore, place: Place):
    appended(store, collectives=collectives([1, 2], rank=0, nranks=3))
    appended(store, collectives=collectives([1, 2], rank=1, nranks=3, late_ns=1_000_000))
    border_s = time.monotonic()
    appended(store, collectives=collectives([2], rank=2, nranks=3, late_ns=7_000_000))
    store._compactor._seal("a", "collectives", settle_s=time.monotonic() - border_s)
    assert store.snapshot("a").hot["collectives"].num_rows == 1
    again = reopened(store, place)
    with closing(again):
        again.seal_all()
        assert sql(again, "SELECT rank, late_ns FROM collectives WHERE seq = 2 ORDER BY rank") == [
            (0, -1_000_000),
            (1, 0),
            (2, 6_000_000),
        ]
        assert sql(again, "SELECT DISTINCT late_ns FROM collectives WHERE seq = 1") == [(None,)]


def test_rows_are_sealed_once_if_complete_rounds_follow_the_cutoff(store: HubStore):
    before, after = list(range(1, 21)), [21, 22]
    for rank in (0, 1):
        appended(store, collectives=collectives(before, rank=rank, nranks=2, late_ns=rank * 3_000_000))
    border_s = time.monotonic()
    for rank in (0, 1):
        appended(store, collectives=collectives(after, rank=rank, nranks=2, late_ns=rank * 5_000_000))
    store._compactor._seal("a", "collectives", settle_s=time.monotonic() - border_s)
    assert store.snapshot("a").hot["collectives"].num_rows == 4
    store.seal_all()
    assert sql(store, "SELECT seq, rank, late_ns FROM collectives ORDER BY seq, rank") == [
        *((seq, rank, rank * 3_000_000) for seq in before for rank in (0, 1)),
        *((seq, rank, rank * 5_000_000) for seq in after for rank in (0, 1)),
    ]


def test_small_files_are_merged_and_the_originals_deleted_later(place: Place):
    with closing(place.open(Limits(maintenance_s=3600, settle_s=0, grace_s=0.2))) as store:
        for i in range(9):
            appended(store, events=events([f"e{i}"], NOW_NS + i))
            store.seal_all()
        old = files(store)
        maintained(store)
        (merged,) = files(store)
        assert len(old) == 9 and n_rows(store) == 9
        assert all(path.exists() for path in old), "a question may still read them"
        time.sleep(0.25)
        maintained(store)
        assert [path for path in old if path.exists()] == [] and merged.exists()
        assert sql(store, "SELECT name FROM stored_events") == [(f"e{i}",) for i in range(9)]


def test_old_files_expire_by_age_and_by_size(place: Place):
    now_ns, day_ns = time.time_ns(), 86_400 * 10**9
    with closing(place.open(Limits(maintenance_s=3600, settle_s=0, max_age_s=10 * 86_400))) as store:
        for days in (20, 5, 1):
            appended(store, events=events([f"{days} days old"], now_ns - days * day_ns))
            store.seal_all()
        maintained(store)
        assert sql(store, "SELECT name FROM stored_events ORDER BY ts") == [("5 days old",), ("1 days old",)]
        sizes = [path.stat().st_size for path in files(store)]
    with closing(
        place.open(Limits(maintenance_s=3600, max_age_s=10 * 86_400, max_bytes=max(sizes)))
    ) as store:
        maintained(store)
        assert sql(store, "SELECT name FROM stored_events") == [("1 days old",)]
        assert len(list(place.folder.rglob("*.parquet"))) <= 3


def test_housekeeping_goes_on_by_itself(place: Place):
    with closing(place.open(Limits(maintenance_s=0.05, settle_s=0, seal_rows=10))) as store:
        appended(store, events=events(["x"] * 12))
        until_s = time.monotonic() + 20
        while not files(store) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert len(files(store)) == 1 and n_rows(store) == 12


def test_a_full_disk_fails_only_the_current_batch(store: HubStore, monkeypatch: pytest.MonkeyPatch):
    appended(store, events=events(["before"]))

    def full(*_: object, **__: object) -> None:
        raise StorageFailed("cannot write: no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._journal, "commit", full)
        with pytest.raises(StorageFailed, match="no space"):
            appended(store, batch_id="b", events=events(["during"]))
    appended(store, batch_id="b", events=events(["during"]))
    assert sql(store, "SELECT name FROM stored_events ORDER BY name") == [("before",), ("during",)]


def test_rows_of_the_hub_itself_are_replaced_by_key(store: HubStore):
    for state in ("open", "closed"):
        verdict = pa.table({"verdict_id": ["v1"], "state": [state], "cluster_id": ["c1"]})
        appended(store, verdicts=verdict)
    appended(store, "b", verdicts=pa.table({"verdict_id": ["v1"], "state": ["open"]}))
    assert sql(store, "SELECT verdict_id, state FROM verdicts") == [("v1", "closed")]
    assert sql(store, "SELECT state FROM verdicts", "b") == [("open",)]


def test_nodes_are_stored_with_their_attributes_and_times(store: HubStore, place: Place):
    appended(store, events=events(["x"]), nodes=pa.table({"node_id": ["n0"], "gpu_model": ["H100"]}))
    question = "SELECT node_id, gpu_model, last_seen >= first_seen FROM nodes"
    assert sql(store, question) == [("n0", "H100", True)]
    again = reopened(store, place)
    with closing(again):
        assert sql(again, question) == [("n0", "H100", True)]
        assert sql(again, question, "b") == []


def test_listeners_hear_every_committed_batch_and_cannot_stop_it(store: HubStore):
    heard: list[str] = []

    def failing(batch: Batch) -> None:
        raise ValueError("not mine")

    store.subscribe(failing)
    store.subscribe(lambda batch: heard.append(batch.batch_id))
    for batch_id in ("one", "two", "two"):
        appended(store, batch_id=batch_id, events=events(["x"]))
    appended(store, batch_id="three", events=events(["x"]))
    assert heard == ["one", "two", "three"]
    assert store.counters.listener_failures == 3


def test_unknown_queries_and_missing_parameters_are_errors(store: HubStore):
    with pytest.raises(NotFound):
        store.ask("nothing", tenant="a", params={})
    with pytest.raises(NotFound):
        store.ask("../node", tenant="a", params={})
    with pytest.raises(BadInput):
        store.ask("lateness", tenant="a", params={})


WRITER = """
import sys
import pyarrow as pa
from stallscope.store.hub.store import Batch
print("ready", flush=True)
first, number = int(sys.argv[1]), 0
while True:
    name = f"{first}-{number}"
    rows = pa.table({"ts_ns": [1_795_000_000_000_000_000 + i for i in range(50)], "name": [name] * 50})
    store.append(Batch(name, "a", {"events": rows})).result()
    print(name, flush=True)
    number += 1
"""


@pytest.mark.parametrize("n_acknowledged", [1, 20, 45])
def test_every_acknowledged_row_is_there_once_after_kill_9(place: Place, n_acknowledged: int):
    acknowledged: list[str] = []
    for life in range(2):  # the second begins in the folder that the first left
        limits = "settle_s=0, seal_rows=200, maintenance_s=0.02, grace_s=0"
        command = [sys.executable, "-c", place.opening(limits) + WRITER, str(life)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writing:
            assert writing.stdout and writing.stdout.readline() == "ready\n"
            for _ in range(n_acknowledged):
                acknowledged.append(writing.stdout.readline().strip())
            writing.kill()
            acknowledged += writing.stdout.read().splitlines()
    with closing(place.open()) as store:
        rows = dict(sql(store, "SELECT name, count(*) FROM stored_events GROUP BY name"))
        assert set(acknowledged) <= set(rows)
        assert set(rows.values()) == {50}
        assert len(set(rows) - set(acknowledged)) <= 2, "at most what was under way in each life"


def test_old_closed_verdicts_expire_with_their_chains(place: Place):
    us, day_us = pa.timestamp("us", "UTC"), 86_400 * 10**6
    now_us = time.time_ns() // 1000
    with closing(place.open(Limits(maintenance_s=3600, settle_s=0, max_age_s=10 * 86_400))) as store:
        for name, state, days in (("old", "closed", 20), ("fresh", "closed", 1), ("lasting", "open", 20)):
            when = pa.array([now_us - days * day_us], us)
            is_closed = state == "closed"
            closed = when if is_closed else pa.nulls(1, us)
            output = {"verdict_id": [name], "state": [state], "updated_at": when, "closed_at": closed}
            appended(store, verdicts=pa.table(output))
            appended(store, causal_chains=pa.table({"causal_chain_id": [name], "state": [state]}))
        appended(store, "b", causal_chains=pa.table({"causal_chain_id": ["old"], "state": ["closed"]}))
        maintained(store)
        left = [("fresh",), ("lasting",)]
        assert sql(store, "SELECT verdict_id FROM verdicts ORDER BY 1") == left
        assert sql(store, "SELECT causal_chain_id FROM causal_chains ORDER BY 1") == left
        assert sql(store, "SELECT causal_chain_id FROM causal_chains", "b") == [("old",)]
        assert store.kept.expired_verdicts == 1
    with closing(place.open()) as again:
        assert sql(again, "SELECT verdict_id FROM verdicts ORDER BY 1") == left


def test_old_ended_jobs_expire_with_their_owners(place: Place):
    day_us = 86_400 * 10**6
    now_us = time.time_ns() // 1000
    jobs = {"old": (20, 20), "fresh": (1, 1), "lasting": (20, None), "of an old trace": (0, 20)}
    with closing(place.open(Limits(maintenance_s=3600, settle_s=0, max_age_s=10 * 86_400))) as store:
        for name, (changed, ended) in jobs.items():
            row = {
                "cluster_id": ["c"],
                "job": [name],
                "owner_user": ["ann"],
                "updated_at": pa.array([now_us - changed * day_us], pa.timestamp("us", "UTC")),
                "ended_ns": pa.array([ended and (now_us - ended * day_us) * 1000], pa.int64()),
            }
            appended(store, jobs=pa.table(row))
        maintained(store)
        left = [("fresh",), ("lasting",), ("of an old trace",)]
        assert sql(store, "SELECT job FROM jobs WHERE owner_user = 'ann' ORDER BY 1") == left
    with closing(place.open()) as again:
        assert sql(again, "SELECT job FROM jobs ORDER BY 1") == left


def test_owners_expire_by_their_own_age_and_the_jobs_stay(place: Place):
    us, day_us = pa.timestamp("us", "UTC"), 86_400 * 10**6
    now_us = time.time_ns() // 1000
    limits = Limits(maintenance_s=3600, settle_s=0, seal_after_s=0, owner_max_age_s=10 * 86_400)
    whole = json.dumps({"owner": {"user": "ann"}, "summary": "job 1 of ann", "evidence": {"holder": "job 1"}})
    with closing(place.open(limits)) as store:
        for name, days, is_over in (("old", 20, True), ("fresh", 1, True), ("lasting", 20, False)):
            when = pa.array([now_us - days * day_us], us)
            ended = pa.array([1 if is_over else None], pa.int64())
            job = {
                "cluster_id": ["c"],
                "job": [name],
                "owner_user": ["ann"],
                "updated_at": when,
                "ended_ns": ended,
            }
            appended(store, jobs=pa.table(job))
            state, closed = ("closed", when) if is_over else ("open", pa.nulls(1, us))
            verdict = {"verdict_id": [name], "kind": ["idle"], "state": [state], "updated_at": when}
            verdict |= {
                "closed_at": closed,
                "owner_user": ["ann"],
                "summary": ["job 1 of ann"],
                "verdict": [whole],
            }
            appended(store, verdicts=pa.table(verdict))
            appended(
                store, owners=pa.table({"ts_ns": [1], "node_id": ["n"], "pid": [7], "owner_user": ["ann"]})
            )
        maintained(store)
        kept = [("fresh", "ann"), ("lasting", "ann"), ("old", None)]
        assert sql(store, "SELECT job, owner_user FROM jobs ORDER BY 1") == kept
        assert sql(store, "SELECT verdict_id, owner_user FROM verdicts ORDER BY 1") == kept
        (row,) = sql(store, "SELECT summary || verdict FROM verdicts WHERE verdict_id = 'old'")
        assert "ann" not in row[0] and "job 1" not in row[0]
        assert sql(store, "SELECT count(*) FROM owners") == [(3,)]  # received now, whenever they began
    with closing(place.open(replace(limits, owner_max_age_s=0.0))) as again:
        maintained(again)
        assert sql(again, "SELECT count(*) FROM owners") == [(0,)]
        assert sql(again, "SELECT job, owner_user FROM jobs ORDER BY 1") == [
            ("fresh", None),
            ("lasting", "ann"),
            ("old", None),
        ]


def test_a_seal_takes_at_most_the_rows_that_are_sorted_in_memory():
    hot, n = HotRows(), 20_000
    for number in range(4):
        hot.add("a", "events", pa.table({"ts_ns": np.arange(n)}), received_us=number)
    for max_rows, max_bytes, n_pieces in (
        (5 * n, 17 * n, 2),
        (3 * n, 80 * n, 3),
        (5 * n, 1, 1),
        (5 * n, 80 * n, 4),
    ):
        now, later = hot.begin_seal("a", "events", None, max_rows=max_rows, max_bytes=max_bytes)
        assert (len(now), len(later)) == (n_pieces, 4 - n_pieces)
