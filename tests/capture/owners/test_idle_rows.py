"""GPUs that are held without use, and the jobs that only seem to be idle."""

import os
from dataclasses import replace
from itertools import pairwise

from stallscope.capture.owners.gpu_calls import GpuCalls
from stallscope.capture.owners.idle_rows import NO_CALLS, NO_PROCESS, GpuProcess, IdleGpus
from stallscope.capture.owners.owners import Owners
from stallscope.capture.owners.proc_activity import JobProcess, ProcActivity
from stallscope.capture.owners.source import Allocation
from stallscope.events import layout
from stallscope.events.names import Op

S = 10**9
AFTER_S = 300
WALL_S = 1_000_000
JOB = Allocation(("job", "1"), {"job": "1", "user": "ann"}, ("0", "1", "2", "3"), (WALL_S + 100) * S)


class Machine:
    """CPU time and data of the holder's processes, which the test lets grow per second."""

    def __init__(self, *others: JobProcess, cpu_share: float = 0.0, bytes_per_s: float = 0.0):
        self.cpu_share, self.bytes_per_s, self.now_s = cpu_share, bytes_per_s, 0.0
        self.asked: list[tuple[str, str]] = []
        self.idle = IdleGpus(
            0,
            AFTER_S * S,
            used=lambda pids: (int(self.now_s * self.cpu_share * S), int(self.now_s * self.bytes_per_s)),
            with_label=lambda label, value: self.asked.append((label, value)) or others,
            wall_offset_ns=lambda: WALL_S * S,
        )

    def rows(self, until_s: int, allocations=(), processes=(), *, from_s: int = 100, **more):
        """All rows, second by second, as (second, gpu, is_idle, reason, since in s)."""
        out = []
        for self.now_s in range(from_s, until_s):
            for row in self.idle.rows(int(self.now_s) * S, allocations, processes, **more):
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
    return replace(GpuProcess(7, {"job": "1"}, 150 * S), **changes)


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
    rows = Machine().rows(500, [], [process(labels={"user": "ann"}, gpus=("5", "6"))])
    assert {row[1:4] for row in rows} == {("5", 1, NO_CALLS), ("6", 1, NO_CALLS)}


def test_a_process_that_has_never_used_a_gpu_outside_a_scheduler_holds_none():
    assert Machine().rows(800, [], [process(labels={}, used_ns=0)]) == []


def test_a_process_may_wait_for_a_peer_on_another_machine():
    assert Machine().rows(1000, [JOB], [process(n_peers=2)]) == []


def test_a_group_that_is_here_as_a_whole_and_at_rest_is_idle():
    group = [process(n_peers=2), process(pid=8, n_peers=2, used_ns=160 * S)]
    rows = Machine().rows(700, [JOB], group)
    assert {row[3:] for row in rows} == {(NO_CALLS, 160)}
    assert Machine().rows(700, [JOB], [group[0], process(pid=8, n_peers=2, used_ns=690 * S)]) == []
    assert Machine(cpu_share=0.2).rows(700, [JOB], group) == []


SHELL = JobProcess(70, "bash", {"job": "1"})
LAUNCHER = JobProcess(71, "python3", {"job": "1"})


def test_a_job_whose_process_may_be_starting_is_listed_after_some_minutes():
    rows = Machine(LAUNCHER).rows(600, [JOB])
    assert 100 + AFTER_S <= min(row[0] for row in rows) <= 100 + AFTER_S + 20
    assert {row[3:] for row in rows} == {(NO_PROCESS, 100)}


def test_a_shell_that_waits_for_its_user_does_not_use_the_gpus():
    keeper = JobProcess(72, "sleep", {"job": "1"})
    extern = JobProcess(73, "prolog", {"job": "1", "job_step": "extern"})
    assert min(row[0] for row in Machine(SHELL, keeper, extern).rows(300, [JOB])) <= 160


def test_a_launcher_that_waits_for_another_machine_is_never_idle():
    assert Machine(LAUNCHER._replace(has_peers=True)).rows(1000, [JOB]) == []


def test_the_processes_of_a_pod_are_known_by_its_uid():
    machine = Machine()
    machine.rows(200, [Allocation(("pod", "p"), {"pod": "p", "pod_uid": "u"}, ("GPU-1",), 0)])
    assert set(machine.asked) == {("pod_uid", "u")}


def test_a_gpu_with_a_process_that_is_not_traced_is_in_use():
    rows = Machine().rows(300, [JOB], number=lambda name: name, occupied={"1"})
    assert {row[1] for row in rows} == {"0", "2", "3"}


def test_a_job_that_computes_on_the_cpu_is_at_work():
    assert Machine(cpu_share=0.2).rows(1000, [JOB], [process()]) == []
    assert Machine(cpu_share=0.2).rows(1000, [JOB]) == []


def test_a_job_that_reads_data_is_at_work():
    assert Machine(bytes_per_s=1e6).rows(1000, [JOB], [process()]) == []


def test_gpus_of_a_job_without_a_process_on_them_are_idle_while_the_others_are_used():
    machine, rows = Machine(), []
    for second in range(100, 500, 10):
        using = [process(used_ns=second * S, gpus=("2",)), process(pid=8, used_ns=second * S, gpus=("3",))]
        rows += machine.rows(second + 1, [JOB], using, from_s=second)
    assert {row[1:] for row in rows} == {("0", 1, NO_PROCESS, 100), ("1", 1, NO_PROCESS, 100)}
    assert min(row[0] for row in rows) == 100 + AFTER_S
    using.append(process(pid=9, used_ns=500 * S, gpus=("0",)))
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
    (first,) = calls.processes([7], owned.labels, owned.n_peers, owned.gpu_uuid)
    assert first.gpus == ("MIG-1",)
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
    found = calls.processes([7, 8], lambda pid: {}, {7: 1, 8: 2}.__getitem__)
    assert found == [GpuProcess(7, {}, 5, ("3",), 1), GpuProcess(8, {}, 6, (), 2)]


def driver_rows(alive: int = 1) -> GpuCalls:
    """Two GPUs, the second with a partition. Process 7: the first and the partition. Process 9: the second."""
    gpus = layout.empty(layout.GPUS, 3)
    gpus["gpu"], gpus["mig"], gpus["uuid"] = [0, 1, 1], [-1, -1, 2], [b"GPU-a", b"GPU-b", b"MIG-c"]
    listed = layout.empty(layout.GPU_PROCESSES, 3)
    listed["pid"], listed["gpu"], listed["mig"] = [7, 7, 9], [0, 1, 1], [-1, 2, -1]
    listed["alive"] = [1, 1, alive]
    calls = GpuCalls()
    calls.take(layout.GPUS, gpus)
    calls.take(layout.GPU_PROCESSES, listed)
    return calls


def test_the_driver_names_all_gpus_and_partitions_of_a_process():
    calls = driver_rows()
    (found,) = calls.processes([7], lambda pid: {}, lambda pid: 1)
    assert found.gpus == ("0", "MIG-c")
    assert [calls.number(name) for name in ("GPU-b", "MIG-c", "3")] == ["1", "MIG-c", "3"]
    assert calls.occupied({7}) == {"1"}
    assert driver_rows(alive=0).occupied({7}) == set()


def test_gpus_of_a_pod_are_compared_by_the_numbers_of_the_driver():
    pod = Allocation(("pod", "p"), {"pod": "p"}, ("GPU-a", "GPU-b"), (WALL_S + 100) * S)
    calls, machine, rows = driver_rows(), Machine(), []
    for second in range(100, 500, 50):
        using = [process(labels={"pod": "p"}, used_ns=second * S, gpus=("0",))]
        rows += machine.rows(second + 1, [pod], using, from_s=second, number=calls.number)
    assert {row[1:4] for row in rows} == {("GPU-b", 1, NO_PROCESS)}


def proc_folder(
    tmp_path, pid: int, parent: int, *, comm="python3", environ="", command="x", ticks=(0, 0, 0, 0)
):
    """A process in a folder like /proc. ticks: own user and system time, and of ended children."""
    folder = tmp_path / str(pid)
    folder.mkdir(exist_ok=True)
    fields = ["S", parent, *[0] * 7, 2, 1, *ticks, *[0] * 4, 555, *[0] * 20]
    (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(map(str, fields))}")
    (folder / "io").write_text("rchar: 100\nwchar: 20\nsyscr: 9\nread_bytes: 4096\nwrite_bytes: 3\n")
    (folder / "environ").write_bytes(environ.replace(" ", "\0").encode())
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())


def activity(tmp_path, now_s=lambda: 0.0) -> ProcActivity:
    return ProcActivity(tmp_path, lambda pid, variables: {"job": variables.get("SLURM_JOB_ID", "")}, now_s)


def test_ended_children_and_mapped_files_count_as_work(tmp_path):
    """A compiler that starts short programs: their CPU time belongs to the process that waited for them."""
    proc_folder(tmp_path, 7, 1, ticks=(1, 2, 30, 40))
    proc_folder(tmp_path, 8, 7, ticks=(5, 0, 0, 0))
    proc_folder(tmp_path, 9, 1, ticks=(100, 0, 0, 0))
    cpu_ns, n_bytes = activity(tmp_path).used([7])
    assert cpu_ns == (1 + 2 + 30 + 40 + 5) * 10**9 // os.sysconf("SC_CLK_TCK")
    of_each = 100 + 20 + 4096 + 3 + (2 + 1) * os.sysconf("SC_PAGE_SIZE")
    assert n_bytes == 2 * of_each


def test_processes_of_a_job_are_read_from_the_process_table_once_for_all_holders(tmp_path):
    proc_folder(tmp_path, 7, 1, environ="SLURM_JOB_ID=1 WORLD_SIZE=8")
    proc_folder(tmp_path, 8, 1, environ="SLURM_JOB_ID=1", command="torchrun --nnodes=2 train.py")
    proc_folder(tmp_path, 9, 1, environ="SLURM_JOB_ID=2", comm="a) b", command="torchrun --nnodes 1 train.py")
    now_s = [0.0]
    read = activity(tmp_path, lambda: now_s[0])
    assert {found.pid: found.has_peers for found in read.with_label("job", "1")} == {7: True, 8: True}
    assert [tuple(found) for found in read.with_label("job", "2")] == [(9, "a) b", {"job": "2"}, False)]
    proc_folder(tmp_path, 10, 1, environ="SLURM_JOB_ID=2")
    assert len(read.with_label("job", "2")) == 1
    now_s[0] = 5.0
    assert len(read.with_label("job", "2")) == 2
