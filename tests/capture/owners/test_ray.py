"""Jobs and actors of Ray, from answers in the format of Ray 2.53: JobDetails, NodeState and ActorState."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stallscope.capture.owners.hints import ADDRESSES, N_PEERS, OWN_PID, hints
from stallscope.capture.owners.owners import Owners
from stallscope.capture.owners.ray import Ray
from stallscope.capture.owners.schedulers import OwnerOptions, owner_sources
from stallscope.capture.owners.source import RAY_JOB
from stallscope.capture.process.workload import workload

DRIVER = {"type": "DRIVER", "job_id": "03000000", "submission_id": None, "metadata": {}}
SUBMITTED = {
    "type": "SUBMISSION",
    "job_id": "01000000",
    "submission_id": "raysubmit_ZxT1",
    "driver_info": {"id": "01000000", "node_ip_address": "10.0.0.1", "pid": "812"},
    "status": "RUNNING",
    "entrypoint": "python train.py",
    "message": "Job is currently running.",
    "start_time": 1764469000000,
    "end_time": None,
    "metadata": {"owner": "ann"},
    "runtime_env": {},
}
NAMED = SUBMITTED | {"job_id": "02000000", "metadata": {"job_name": "night"}}
NODES = [
    {"node_id": "n1", "node_ip": "10.0.0.1", "node_name": "10.0.0.1", "state": "ALIVE", "is_head_node": True},
    {
        "node_id": "n2",
        "node_ip": "10.0.0.2",
        "node_name": "10.0.0.2",
        "state": "ALIVE",
        "is_head_node": False,
    },
]


def actor(node: str, pid: int, name: str = "", job: str = "01000000", state: str = "ALIVE") -> dict[str, Any]:
    return {
        "actor_id": f"a{node}{pid}",
        "class_name": "RayTrainWorker",
        "state": state,
        "job_id": job,
        "name": name,
        "node_id": node,
        "pid": pid,
        "ray_namespace": "default",
        "repr_name": "",
    }


def listed(rows: list[dict[str, Any]]) -> str:
    result = {
        "total": len(rows),
        "num_after_truncation": len(rows),
        "num_filtered": len(rows),
        "result": rows,
    }
    return json.dumps({"result": True, "msg": "", "data": {"result": result | {"warnings": None}}})


def refreshed(*actors: dict[str, Any]) -> Ray:
    answers = {
        "/api/jobs/": json.dumps([SUBMITTED, NAMED, DRIVER]),
        "/api/v0/nodes": listed(NODES),
        "/api/v0/actors": listed(list(actors)),
    }
    ray = Ray("http://head:8265/", lambda url: answers[urlsplit(url).path])
    ray.refresh()
    return ray


def facts(pid: int, address: str, job: str = "01000000") -> dict[str, str]:
    return {RAY_JOB: job, OWN_PID: str(pid), ADDRESSES: f"127.0.0.1,{address}"}


@pytest.mark.parametrize(
    ("job", "name"), [("01000000", "raysubmit_ZxT1"), ("02000000", "night"), ("03000000", None), ("", None)]
)
def test_a_job_is_named_by_its_metadata_or_its_submission(job: str, name: str | None):
    assert refreshed().labels({"job": job}, {RAY_JOB: job}).get("job_name") == name


def test_a_job_of_slurm_keeps_its_name():
    ray = refreshed(actor("n1", 40, "trainer-0"))
    assert ray.labels({"job": "4711", "job_name": "sweep"}, facts(40, "10.0.0.1")) == {"actor": "trainer-0"}


def test_an_actor_is_identified_by_job_node_and_process():
    ray = refreshed(actor("n1", 40, "trainer-0"), actor("n2", 40), actor("n1", 41, "old", state="DEAD"))
    name = {"job_name": "raysubmit_ZxT1"}
    known = {"job": "01000000"}
    assert ray.labels(known, facts(40, "10.0.0.1")) == name | {"actor": "trainer-0"}
    assert ray.labels(known, facts(40, "10.0.0.2")) == name | {"actor": "RayTrainWorker"}
    for pid, address in ((41, "10.0.0.1"), (42, "10.0.0.1"), (40, "10.0.0.3")):
        assert ray.labels(known, facts(pid, address)) == name
    assert ray.labels({}, facts(40, "10.0.0.1", job="02000000")) == {}


def test_two_actors_with_one_process_number_and_address_have_no_name():
    ray = refreshed(actor("n1", 40, "a"), actor("n1", 40, "b"))
    assert "actor" not in ray.labels({}, facts(40, "10.0.0.1"))


def test_a_worker_that_ray_starts_in_advance_belongs_to_the_job_of_its_actor():
    """Recorded with Ray 2.60: RAY_JOB_ID of the first workers of a node is the nil job."""
    ray = refreshed(actor("n1", 40, "trainer-0", job="02000000"), actor("n2", 41, "other"))
    advance = facts(40, "10.0.0.1", job="ffffffff")
    expected = {"job": "02000000", "job_name": "night", "actor": "trainer-0"}
    assert ray.labels({}, advance) == expected
    assert ray.labels({"job": "4711"}, advance) == {"actor": "trainer-0"}
    assert ray.labels({}, facts(41, "10.0.0.1", job="ffffffff")) == {}
    assert workload(os.getpid(), {RAY_JOB: "ffffffff"}).get("job") is None


def test_number_and_addresses_are_read_in_the_namespaces_of_a_worker(tmp_path: Path):
    home = tmp_path / "7"
    (home / "net").mkdir(parents=True)
    (home / "status").write_text("Name:\tray\nNSpid:\t7\t31\nNSpgid:\t7\t31\n")
    (home / "net" / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n"
        "     |-- 10.0.0.2\n        /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n"
        "Local:\n     |-- 10.0.0.2\n        /32 host LOCAL\n"
    )
    assert hints(7, {RAY_JOB: "01000000", "HOME": "/"}, tmp_path) == {
        RAY_JOB: "01000000",
        OWN_PID: "31",
        ADDRESSES: "10.0.0.2",
        N_PEERS: "1",
    }
    assert hints(7, {"HOME": "/", "WORLD_SIZE": "8"}, tmp_path) == {N_PEERS: "8"}
    assert hints(8, {RAY_JOB: "01000000"}, tmp_path)[OWN_PID] == "8"


def test_a_routing_table_that_needs_several_reads_is_read_whole(tmp_path: Path):
    """A pipe holds 64 KiB, so that one read cannot return this table."""
    table = tmp_path / "7" / "net" / "fib_trie"
    table.parent.mkdir(parents=True)
    os.mkfifo(table)
    text = (
        "     |-- 10.0.0.255\n        /32 link BROADCAST\n" * 2000
        + "     |-- 10.0.0.2\n        /32 host LOCAL\n"
    )
    writer = threading.Thread(target=table.write_text, args=(text,), daemon=True)
    writer.start()
    assert len(text) > 1 << 16
    assert hints(7, {RAY_JOB: "01000000"}, tmp_path)[ADDRESSES] == "10.0.0.2"
    writer.join(10)


def test_addresses_of_a_live_process_include_loopback():
    assert "127.0.0.1" in hints(os.getpid(), {RAY_JOB: "1"})[ADDRESSES].split(",")


def test_a_refusal_and_an_absent_dashboard_are_errors_in_words():
    refusal = json.dumps({"result": False, "msg": "too many requests", "data": {"result": None}})
    ray = Ray(answer=lambda url: "[]" if url.endswith("/api/jobs/") else refusal)
    with pytest.raises(OSError, match="refuses: too many requests"):
        ray.refresh()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(OSError, match=r"/api/jobs/ does not answer \(.*refused"):
        Ray(f"http://127.0.0.1:{port}").refresh()


@pytest.mark.parametrize("answer", ["<html>", "[1]", '{"result": true, "data": {}}'])
def test_an_answer_in_another_format_is_an_error_in_words(answer: str):
    ray = Ray("http://head:8265", lambda url: "[]" if url.endswith("/api/jobs/") else answer)
    with pytest.raises(ValueError, match="http://head:8265 does not answer in the format of Ray's dashboard"):
        ray.refresh()


def test_a_failing_dashboard_costs_one_line():
    asked: list[str] = []

    def answer(url: str) -> str:
        asked.append(url)
        raise OSError("the dashboard does not answer")

    notes: list[str] = []
    owned = Owners([Ray(answer=answer, every_s=0.01)], note=notes.append)
    owned.start()
    end_s = time.monotonic() + 20
    while len(asked) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    owned.close()
    owned.rows({}, node=0, now_ns=1, first_ns={})
    assert len(asked) >= 2
    assert notes == ["owners of Ray are incomplete: the dashboard does not answer; stallscope will retry"]


def test_ray_is_asked_only_where_the_settings_name_it():
    (source,) = owner_sources(OwnerOptions(kinds="ray"), {})
    assert source.name == "Ray"
    assert owner_sources(OwnerOptions(ray_address="http://head:8265"), {}) == []
