"""GPUs that are held without use, and the jobs that only seem to be idle."""

from dataclasses import replace
from itertools import pairwise

from stallscope.capture.owners.gpu_calls import GpuCalls
from stallscope.capture.owners.idle_gpus import NO_CALLS, NO_PROCESS, GpuProcess, IdleGpus
from stallscope.capture.owners.owners import Owners
from stallscope.capture.owners.source import Allocation
from stallscope.events import layout
from stallscope.events.names import Op

S = 10**9
AFTER_S = 300
WALL_S = 1_000_000
JOB = Allocation(("job", "1"), {"job": "1", "user": "ann"}, ("0", "1", "2", "3"), (WALL_S + 100) * S)


class Machine:
    """CPU time and data of the holder's processes, which the test lets grow per second."""

    def __init__(self, *, cpu_share: float = 0.0, bytes_per_s: float = 0.0):
        self.cpu_share, self.bytes_per_s, self.now_s = cpu_share, bytes_per_s, 0.0
        self.idle = IdleGpus(
            0,
            AFTER_S * S,
            used=lambda pids: (int(self.now_s * self.cpu_share * S), int(self.now_s * self.bytes_per_s)),
            with_label=lambda label, value: [],
            wall_offset_ns=lambda: WALL_S * S,
        )

    def rows(self, until_s: int, allocations=(), processes=(), *, from_s: int = 100):
        """All rows from second to second, as (second, gpu, is_idle, reason, since in s)."""
        out = []
        for self.now_s in range(from_s, until_s):
            for row in self.idle.rows(int(self.now_s) * S, allocations, processes):
                out.append(
                    (
                        int(row["ts_ns"]) // S,
                        row["gpu"].decode(),
                        int(row["is_idle"]),
                        row["reason"].decode(),
                        int(row["since_ns"]) // S,
                    )
                )
        return out


def process(**changes) -> GpuProcess:
    return replace(GpuProcess(7, {"job": "1"}, 150 * S, ""), **changes)


def test_an_allocation_without_a_process_is_listed_within_a_minute_of_its_start():
    rows = Machine().rows(161, [JOB])
    assert {row[1] for row in rows} == {"0", "1", "2", "3"}
    assert all(row[0] <= 160 and row[2:] == (1, NO_PROCESS, 100) for row in rows)


def test_the_end_of_the_idle_time_is_a_row():
    machine = Machine()
    machine.rows(200, [JOB])
    ended = machine.rows(201, [], from_s=200)
    assert sorted((row[1], row[2]) for row in ended) == [("0", 0), ("1", 0), ("2", 0), ("3", 0)]
    assert machine.rows(210, [], from_s=201) == []


def test_a_row_is_repeated_every_minute():
    of_first = [row[0] for row in Machine().rows(340, [JOB]) if row[1] == "0"]
    assert len(of_first) >= 3
    assert {later - earlier for earlier, later in pairwise(of_first)} == {60}


def test_a_process_without_calls_is_idle_after_some_minutes():
    rows = Machine().rows(500, [JOB], [process()])
    assert {row[3:] for row in rows} == {(NO_CALLS, 150)}
    assert min(row[0] for row in rows) >= 150 + AFTER_S


def test_a_notebook_outside_a_scheduler_is_idle():
    rows = Machine().rows(500, [], [process(labels={"user": "ann"}, gpu="5")])
    assert {row[1:4] for row in rows} == {("5", 1, NO_CALLS)}


def test_a_process_that_has_never_used_a_gpu_outside_a_scheduler_holds_none():
    assert Machine().rows(800, [], [process(labels={}, used_ns=0)]) == []


def test_a_member_of_a_communicator_may_wait_for_its_peers():
    assert Machine().rows(1000, [JOB], [process(is_in_communicator=True)]) == []


def test_a_job_that_computes_on_the_cpu_is_at_work():
    assert Machine(cpu_share=0.2).rows(1000, [JOB], [process()]) == []
    assert Machine(cpu_share=0.2).rows(1000, [JOB]) == []


def test_a_job_that_reads_data_is_at_work():
    assert Machine(bytes_per_s=1e6).rows(1000, [JOB], [process()]) == []


def test_gpus_of_a_job_without_a_process_on_them_are_idle_while_the_others_are_used():
    machine, rows = Machine(), []
    for second in range(100, 500, 10):
        using = [process(used_ns=second * S, gpu="2"), process(pid=8, used_ns=second * S, gpu="3")]
        rows += machine.rows(second + 1, [JOB], using, from_s=second)
    assert {row[1:] for row in rows} == {("0", 1, NO_PROCESS, 100), ("1", 1, NO_PROCESS, 100)}
    assert min(row[0] for row in rows) == 100 + AFTER_S
    using.append(process(pid=9, used_ns=500 * S, gpu="0"))
    ended = machine.rows(501, [JOB], using, from_s=500)
    assert [(row[1], row[2]) for row in ended if not row[2]] == [("0", 0)]


def test_mig_instances_are_gpus_of_their_own():
    """Two instances on one GPU: one is in use, the other is held by the same pod without a process."""
    pod = Allocation(("pod", "p"), {"pod": "p"}, ("MIG-1", "MIG-2"), (WALL_S + 100) * S)
    owned = Owners(process_labels=lambda pid, variables: {"pod": "p"})
    owned.rows({7: {"NVIDIA_VISIBLE_DEVICES": "MIG-1"}}, node=0, now_ns=1, first_ns={})
    calls = GpuCalls()
    calls.located(7, 0)
    calls.take(layout.GPU_USE, used := layout.empty(layout.GPU_USE, 1))
    used["pid"], used["sm_percent"], used["ts_ns"] = 7, 50, 150 * S
    calls.take(layout.GPU_USE, used)
    (first,) = calls.processes([7], owned.labels, set(), owned.gpu_uuid)
    assert first.gpu == "MIG-1"
    machine, rows = Machine(), []
    for second in range(100, 500, 50):
        rows += machine.rows(second + 1, [pod], [replace(first, used_ns=second * S)], from_s=second)
    assert {row[1:4] for row in rows} == {("MIG-2", 1, NO_PROCESS)}


def test_processes_of_another_namespace_are_not_the_pod_s():
    pod = Allocation(("pod", "p"), {"pod": "p", "namespace": "a"}, ("GPU-1",), 0)
    other = process(labels={"pod": "p", "namespace": "b"}, used_ns=0)
    assert {row[3] for row in Machine().rows(200, [pod], [other])} == {NO_PROCESS}


def test_the_last_use_follows_from_rows_of_the_capture():
    calls = GpuCalls()
    processes = layout.empty(layout.PROCESSES, 1)
    processes["pid"], processes["device"] = 7, 3
    calls.take(layout.PROCESSES, processes)
    operations = layout.empty(layout.OPERATIONS, 2)
    operations["pid"], operations["op"], operations["ts_ns"] = 7, [Op.LAUNCH, Op.IOCTL], [5, 9]
    calls.take(layout.OPERATIONS, operations)
    states = layout.empty(layout.SNAPSHOTS, 2)
    states["pid"], states["ts_ns"], states["in_call"] = [7, 8], 6, [Op.NONE, Op.SYNC]
    calls.take(layout.SNAPSHOTS, states)
    found = calls.processes([7, 8], lambda pid: {}, {8})
    assert found == [GpuProcess(7, {}, 5, "3", False), GpuProcess(8, {}, 6, "", True)]
