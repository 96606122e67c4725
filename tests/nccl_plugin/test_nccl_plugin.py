"""The profiler plugin of NCCL, loaded by an emulated NCCL that makes the calls of versions 3 to 7, and its reader."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stallscope.capture.gpu.nccl_ring import (
    COLL,
    KERNELS,
    P2P,
    PROXY,
    Event,
    NcclRing,
    RecordFlag,
    ring_of,
)

from ..patience import until

pytestmark = pytest.mark.compiler
SOURCE = Path(__file__).resolve().parents[2] / "nccl_plugin"
SOURCES = Path(__file__).parent
VERSIONS = (3, 4, 5, 6, 7)
OF_AGENT = KERNELS | Event.PROXY_OP | Event.PROXY_STEP


def compiled(out: Path, *words: object) -> Path:
    subprocess.run(["gcc", "-O2", "-o", out, *map(str, words), "-ldl", "-lpthread"], check=True)
    return out


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin and the emulated NCCL."""
    folder = tmp_path_factory.mktemp("plugin")
    subprocess.run(["make", "-s", "-C", SOURCE, f"OUT={folder}/plugin.so"], check=True)
    compiled(folder / "nccl", Path(__file__).with_name("emulated_nccl.c"))
    return folder


class Job:
    """A process of the emulated NCCL."""

    def __init__(self, folder: Path, version: int, program: str = "nccl", **environment: str):
        self.process = subprocess.Popen(
            [folder / program, folder / "plugin.so", str(version)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        assert self._line() == ["ready", str(self.process.pid)]

    def _line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def does(self, command: str) -> dict[str, int]:
        """Run a command to its end: `done FAILED mask MASK ns TIME`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        words = self._line()
        assert words and words[0] == "done", (words, self.process.poll())
        return {"failed": int(words[1]), "mask": int(words[3]), "ns": int(words[5])}

    def ends(self) -> str:
        """End the process. Returns its errors."""
        _, err = self.process.communicate("quit\n", timeout=30)
        assert self.process.returncode == 0, err
        return err


@pytest.fixture
def start(programs: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def started(version: int, program: str = "nccl", **environment: str) -> tuple[Job, NcclRing]:
        jobs.append(Job(programs, version, program, **environment))
        ring = ring_of(jobs[-1].process.pid)
        assert ring is not None
        return jobs[-1], ring

    yield started
    for job in jobs:
        with job.process:  # closes its pipes
            job.process.kill()


def switch(ring: NcclRing, job: Job, events: Event = KERNELS, seconds: float = 60.0) -> None:
    """Switch, and wait until the plugin has followed."""
    ring.switch(events, seconds=seconds)
    wait_for_mask(ring, job, events)


def wait_for_mask(ring: NcclRing, job: Job, events: Event) -> None:
    """Wait until the plugin has passed these events to NCCL."""
    deadline = time.monotonic() + 30
    while job.does("mask")["mask"] & OF_AGENT != events or ring.active != events:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_collective_becomes_one_record_with_the_times_of_its_kernel(start, version: int):
    job, ring = start(version)
    switch(ring, job)
    job.does("run 300 4")
    rows = ring.drain()
    assert rows["seq"].tolist() == list(range(300)) and ring.n_lost == ring.n_dropped == 0
    assert (
        set(rows["kind"]) == {COLL} and set(rows["func"]) == {b"AllReduce"} and set(rows["count"]) == {4096}
    )
    assert set(rows["comm_hash"]) == {0xABC} and set(rows["rank"]) == {3} and set(rows["n_channels"]) == {4}
    assert (np.diff(rows["host_ns"].astype(np.int64)) > 0).all()
    if version == 3:
        assert set(rows["flags"]) == {RecordFlag.HAS_GPU_TIMES | RecordFlag.ON_HOST_CLOCK}
        assert (rows["start_ns"] >= rows["host_ns"]).all() and (rows["stop_ns"] >= rows["start_ns"]).all()
    else:
        assert set(rows["flags"]) == {RecordFlag.HAS_GPU_TIMES}
        assert rows["start_ns"].tolist() == [1000 * seq for seq in range(300)]
        assert rows["stop_ns"].tolist() == [1000 * seq + 3 + 500 for seq in range(300)]
        (comm,) = ring.communicators()
        assert (comm.comm_hash, comm.rank, comm.n_ranks, comm.n_nodes, comm.name) == (
            0xABC,
            3,
            16,
            2,
            "world",
        )
    job.ends()


def test_a_job_lives_on_after_nccl_has_closed_the_plugin(start):
    """NCCL closes the library with the last communicator, and loads it again for the next one."""
    job, ring = start(5)
    switch(ring, job)
    job.does("run 10 4")
    job.does("close")
    for events in (Event(0), KERNELS):  # the plugin's thread runs
        ring.switch(events, seconds=60)
        until(lambda events=events: ring.active == events)
    assert (
        job.does("mask")["mask"] == KERNELS
    )  # of before: the plugin does not write to NCCL's memory any more
    ring.switch(Event(0), seconds=0)
    until(lambda: ring.active == Event(0))
    assert job.does("mask")["mask"] == KERNELS
    job.does("open")
    switch(ring, job)
    job.does("run 10 4")
    assert len(ring.drain()) == 20 and [comm.is_open for comm in ring.communicators()] == [False, True]
    job.ends()


@pytest.mark.parametrize("version", VERSIONS)
def test_transfers_and_the_network_part_of_proxies_are_recorded(start, version: int):
    job, ring = start(version)
    switch(ring, job, KERNELS | Event.PROXY_OP | Event.PROXY_STEP)
    job.does("p2p 5")
    rows = ring.drain()
    assert (
        [int(n) for n in rows["peer"]] == [5] * 5
        and set(rows["kind"]) == {P2P}
        and set(rows["func"]) == {b"Send"}
    )
    switch(ring, job, Event.COLL | Event.PROXY_OP | Event.PROXY_STEP)
    job.does("proxy 2")
    rows = ring.drain()
    rows = rows[rows["kind"] == PROXY]
    assert rows["peer"].tolist() == [2, 2] and set(rows["func"]) == {b"AllReduce"}
    assert (rows["flags"] & RecordFlag.IS_SEND).all()
    duration_ms, network_ms = rows["start_ns"] / 1e6, rows["stop_ns"] / 1e6
    assert (network_ms >= 30).all() and (
        duration_ms - network_ms >= 6
    ).all()  # 3 steps: 10 ms network, 2 ms GPU
    job.ends()


def test_steps_at_the_same_time_count_once_as_time_of_the_network(start):
    job, ring = start(5)
    switch(ring, job, Event.COLL | Event.PROXY_OP | Event.PROXY_STEP)
    job.does("pipeline 3")
    rows = ring.drain()
    rows = rows[rows["kind"] == PROXY]
    assert len(rows) == 3 and (rows["stop_ns"] >= 10_000_000).all()
    assert (rows["stop_ns"] <= rows["start_ns"]).all()


@pytest.mark.parametrize("version", VERSIONS)
def test_operations_of_the_proxy_for_another_process_are_ignored(start, version: int):
    """Their addresses are of the other process. NCCL sends data of a rank by the proxy of another rank on the node."""
    job, ring = start(version)
    switch(ring, job, Event.COLL | Event.PROXY_OP | Event.PROXY_STEP)
    job.does("pxn 3")
    job.does("proxy 1")
    assert ring.drain()["kind"].tolist() == [PROXY, COLL]
    job.ends()


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_recorded_until_the_agent_asks_and_after_its_lease(start, version: int):
    job, ring = start(version)
    assert job.does("run 100 4")["mask"] == 0
    assert len(ring.drain()) == 0
    ring.switch(KERNELS, seconds=0.2)
    time.sleep(0.3)
    wait_for_mask(ring, job, Event(0))  # the reader does nothing: its lease ends
    ring.drain()
    job.does("run 100 4")
    assert len(ring.drain()) == 0
    job.ends()


@pytest.mark.parametrize("tls_kilobytes", [256, 1536])
def test_the_plugin_follows_the_agent_in_a_job_with_large_thread_local_variables(
    start, programs: Path, tls_kilobytes: int
):
    """1536 KB are more than the first stack that the plugin asks for."""
    program = f"nccl-{tls_kilobytes}"
    compiled(programs / program, f"-DTLS_BYTES={tls_kilobytes}*1024", SOURCES / "emulated_nccl.c")
    job, ring = start(5, program)
    assert ring.has_thread
    switch(ring, job)
    job.does("run 5 1")
    assert len(ring.drain()) == 5


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_with_graphs_keeps_its_mask_and_records_only_when_asked(start, version: int):
    """NCCL latches the mask of a collective at the capture of its graph, long before the agent asks."""
    job, ring = start(version, STALLSCOPE_NCCL_GRAPHS="1")
    assert job.does("mask")["mask"] == int(KERNELS)
    job.does("run 50 4")
    assert len(ring.drain()) == 0
    switch(ring, job)
    job.does("run 50 4")
    assert len(ring.drain()) == 50 and ring.n_dropped == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_each_replay_of_a_graph_has_a_number_of_its_own(start, version: int):
    """NCCL counts replays only if their group has a handle, also while no window is open."""
    job, ring = start(version, STALLSCOPE_NCCL_GRAPHS="1")
    job.does("capture")
    job.does("replay 5 2")
    assert len(ring.drain()) == 0
    switch(ring, job)
    job.does("replay 10 2")
    rows = ring.drain()
    assert rows["seq"].tolist() == list(range(5, 15))
    assert (rows["flags"] & RecordFlag.HAS_GPU_TIMES != 0).all()
    # From version 5 on, NCCL reports whether a call is captured.
    assert (rows["flags"] & RecordFlag.IS_REPLAY != 0).tolist() == [version > 4] * 10
    job.does("run 5 2")
    assert (ring.drain()["flags"] & RecordFlag.IS_REPLAY == 0).all()


def test_replays_of_a_graph_without_the_setting_have_no_numbers(start):
    """NCCL does not number them; the diagnosis drops such rounds."""
    job, ring = start(5)
    switch(ring, job)
    job.does("capture")
    job.does("replay 4 1")
    assert ring.drain()["seq"].tolist() == [0, 0, 0, 0]


def test_a_full_ring_counts_lost_records_and_keeps_the_newest(start):
    job, ring = start(5)
    switch(ring, job)
    n = len(ring._records) + 1000
    job.does(f"run {n} 1")
    rows = ring.drain()
    assert rows["seq"].tolist() == list(range(1000, n)) and ring.n_lost == 1000
    job.ends()


def test_records_are_read_while_they_are_written(start):
    job, ring = start(6)
    switch(ring, job)
    assert job.process.stdin is not None
    job.process.stdin.write("run 20000 2\n")
    job.process.stdin.flush()
    seqs: list[int] = []
    deadline = time.monotonic() + 60
    while len(seqs) + ring.n_lost < 20000 and time.monotonic() < deadline:
        rows = ring.drain()
        assert (rows["start_ns"] == 1000 * rows["seq"]).all() and (
            rows["stop_ns"] == 1000 * rows["seq"] + 501
        ).all()
        seqs += rows["seq"].tolist()
    assert ring.n_lost == 0 and ring.n_dropped == 0 and sorted(seqs) == list(range(20000))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_forked_process_does_not_write_into_the_ring_of_its_parent(start, version: int):
    job, ring = start(version)
    switch(ring, job)
    assert job.does("fork 50")["failed"] == 0
    assert len(ring.drain()) == 0
    job.does("run 10 2")
    assert len(ring.drain()) == 10
    job.ends()


def test_a_child_that_inherits_the_memory_is_not_a_second_rank(start):
    job, _ = start(5)
    child = job.does("clone")["failed"]
    assert any("stallscope-nccl" in str(path.readlink()) for path in Path(f"/proc/{child}/fd").iterdir())
    assert ring_of(child) is None and ring_of(job.process.pid) is not None


def test_a_communicator_may_be_destroyed_during_its_collectives(start):
    job, ring = start(5)
    switch(ring, job)
    job.does("destroy 200")
    job.does("mask")
    rows = ring.drain()
    assert rows["seq"].tolist() == list(range(200)) and (rows["flags"] & RecordFlag.HAS_GPU_TIMES).all()
    assert [comm.is_open for comm in ring.communicators()] == [False]
    job.ends()


@pytest.mark.parametrize(
    ("version", "other"),
    [
        *((3, "V3"), (4, "V4"), (5, "V5"), (6, "V6"), (7, "V7")),
        *((5, "V4"), (6, "V5"), (6, "V4"), (7, "V6"), (7, "V5"), (7, "V4")),
    ],
)
@pytest.mark.parametrize("is_on", [False, True])
def test_another_plugin_receives_the_same_calls(start, programs: Path, version: int, other: str, is_on: bool):
    library = programs / f"other_{other}.so"
    if not library.exists():
        compiled(library, "-shared", "-fPIC", f"-D{other}", Path(__file__).with_name("other_plugin.c"))
    job, ring = start(version, STALLSCOPE_NCCL_CHAIN=str(library))
    if is_on:
        switch(ring, job)
    job.does("run 50 3")
    assert len(ring.drain()) == (50 if is_on else 0)
    words = job.ends().split()
    assert words[0] == "other:"
    counts = dict(zip(words[1::2], map(int, words[2::2]), strict=True))
    assert counts["wrong"] == 0 and counts["init"] == 1
    assert (counts["coll"], counts["kernels"]) == (50, 150)
    n_phases = 150 if other == "V7" else 0
    assert counts["phases"] == n_phases
    assert counts["states"] == (150 + n_phases if version > 3 else 0)
    assert counts["stops"] >= 200


def test_a_chain_that_cannot_be_loaded_is_reported_once(start, tmp_path: Path):
    job, ring = start(5, STALLSCOPE_NCCL_CHAIN=str(tmp_path / "missing.so"))
    switch(ring, job)
    job.does("run 5 1")
    assert len(ring.drain()) == 5
    assert job.ends().count("cannot chain to the profiler plugin") == 1


def test_a_process_without_the_plugin_has_no_ring():
    assert ring_of(os.getpid()) is None
    assert ring_of(1 << 22) is None


@pytest.mark.live
def test_the_command_records_a_running_job(start, run, tmp_path: Path):
    """The job makes collectives for seconds; the command records half a second of them."""
    job, _ = start(5)
    assert job.process.stdin is not None
    job.process.stdin.write("run 8000 2 500\n")
    job.process.stdin.flush()
    db = tmp_path / "gpu.db"
    code, out, err = run("plugin", "record", "--db", db, "--seconds", "0.5", "--pid", job.process.pid)
    assert code == 0, err
    assert out.startswith("1 ranks: ") and f"stallscope explain --db {db}" in out
    assert int(out.split()[2].replace(",", "")) > 50


def test_the_command_lists_the_processes_with_the_plugin_and_changes_nothing(start, run):
    job, ring = start(5)
    switch(ring, job)
    job.does("run 7 2")
    code, out, err = run("plugin", "list")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.split()[0] == str(job.process.pid)]
    assert line.split() == [str(job.process.pid), "3", "7", "0", "records,", "nccl"]
    assert ring.active == KERNELS and len(ring.drain()) == 7


def test_the_command_reports_a_job_without_the_plugin(run, tmp_path: Path):
    code, _, err = run(
        "plugin", "record", "--db", tmp_path / "x.db", "--seconds", "0.1", "--pid", os.getpid()
    )
    assert code == 3 and "NCCL_PROFILER_PLUGIN" in err and not (tmp_path / "x.db").exists()
