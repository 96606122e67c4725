"""Real processes that start and end while they are traced."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from stallscope.capture.process.process_identity import environment
from stallscope.capture.process.processes import Processes, Snapshots, still_runs
from stallscope.events import layout
from stallscope.events.layout import Array


def sleeper(**variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(command, stdin=-1, stdout=-1, env=os.environ | variables)
    child.stdout.readline()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.communicate(b"\n")


def test_a_process_is_reported_once_with_its_rank():
    child = sleeper(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4")
    processes = Processes(node=7)
    (row,) = processes.add(dict.fromkeys([child.pid], 1000))
    assert [row[name] for name in ("node", "pid", "rank", "local_rank", "nranks")] == [7, child.pid, 3, 1, 4]
    assert (row["ts_ns"], row["ended_ns"], row["device"]) == (1000, -1, -1)
    assert row["comm"].startswith(b"python")
    assert len(processes.add(dict.fromkeys([child.pid], 2000))) == 0
    assert len(processes) == 1
    end(child)


def test_the_environment_of_a_new_process_is_read_and_returned_once(monkeypatch):
    child, read = sleeper(RANK="3", SLURM_JOB_ID="77"), []

    def reading(home: Path) -> dict[str, str]:
        read.append(home.name)
        return environment(home)

    for module in ("processes", "process_identity"):
        monkeypatch.setattr(f"stallscope.capture.process.{module}.environment", reading)
    processes = Processes(node=0)
    (row,) = processes.add({child.pid: 0})
    started = processes.take_environment(child.pid)
    assert (row["rank"], started["SLURM_JOB_ID"], read) == (3, "77", [str(child.pid)])
    processes.add({child.pid: 1})
    assert processes.take_environment(child.pid) == {}
    end(child)


def test_the_end_of_a_process_is_reported_once():
    stays, goes = sleeper(), sleeper()
    processes = Processes(node=0)
    processes.add(dict.fromkeys([stays.pid, goes.pid], 0))
    assert processes.remove_ended() == []
    end(goes)
    assert processes.remove_ended() == [goes.pid]
    assert processes.remove_ended() == []
    assert len(processes) == 1
    end(stays)


def test_a_zombie_process_has_ended():
    child = sleeper()
    processes = Processes(node=0)
    processes.add(dict.fromkeys([child.pid], 0))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.remove_ended() == [child.pid]
    child.wait()
    child.stdout.close()


def test_a_process_lives_on_when_only_its_main_thread_has_ended():
    code = (
        "import ctypes, threading\n"
        "threading.Thread(target=input).start()\nprint(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1)
    child.stdout.readline()
    processes = Processes(node=0)
    processes.add(dict.fromkeys([child.pid], 0))
    while f"{child.pid} (python".encode() and b") Z " not in Path(f"/proc/{child.pid}/stat").read_bytes():
        pass
    assert processes.remove_ended() == []
    child.kill()
    child.wait()
    assert processes.remove_ended() == [child.pid]
    child.stdin.close()
    child.stdout.close()


def test_an_end_reported_by_the_kernel_is_accepted():
    child = sleeper()
    processes = Processes(node=0)
    processes.add({child.pid: 5})
    assert processes.remove_ended({child.pid: 10}) == [child.pid]
    assert len(processes.add({child.pid: 20})) == 1
    end(child)


def test_a_number_given_again_is_another_process(tmp_path):
    home = tmp_path / "7"
    home.mkdir()
    stat = "7 (x) S 1 " + " ".join(["0"] * 15) + " 1 0 {} 0\n"
    (home / "stat").write_text(stat.format(100))
    processes = Processes(0, tmp_path)
    processes.add(dict.fromkeys([7], 0))
    (home / "stat").write_text(stat.format(200))
    assert processes.remove_ended() == [7]
    assert len(processes.add(dict.fromkeys([7], 1))) == 1


def test_the_end_of_a_process_has_its_last_snapshot():
    rows = layout.empty(layout.SNAPSHOTS, 2)
    rows["pid"], rows["alive"], rows["ts_ns"], rows["n_collectives"] = [7, 8], 1, 1000, [70, 80]
    snapshots = Snapshots()
    assert snapshots.remember(rows) is rows
    newer = rows.copy()
    newer["ts_ns"], newer["n_collectives"] = 2000, [71, 81]
    snapshots.remember(newer)
    (at_end,) = snapshots.final_rows([8, 9], 2500)
    assert (at_end["pid"], at_end["alive"], at_end["ts_ns"], at_end["n_collectives"]) == (8, 0, 2500, 81)
    assert len(snapshots.final_rows([8], 3000)) == 0
    assert np.all(rows["alive"] == 1)


def joined(pid: int, rank: int, nranks: int, *, comm_hash: int = 5, parent_hash: int = 0) -> Array:
    rows = layout.empty(layout.COMMUNICATORS, 1)
    rows["pid"], rows["comm_rank"], rows["nranks"] = pid, rank, nranks
    rows["comm_hash"], rows["parent_hash"] = comm_hash, parent_hash
    return rows


def places(processes: Processes) -> list[tuple[int, int, int]]:
    return [(each.pid, each.rank, each.nranks) for each in processes.update_ranks()]


def test_the_rank_comes_from_a_communicator_without_a_launcher(tmp_path):
    processes = Processes(0, tmp_path)
    processes.add_communicators(joined(7, 1, 2, comm_hash=1))
    processes.add({7: 1})
    assert places(processes) == [(7, 1, 2)]
    processes.add_communicators(joined(7, 5, 8, comm_hash=2))
    processes.add_communicators(joined(7, 3, 16, comm_hash=3, parent_hash=2))
    assert places(processes) == [(7, 5, 8)]
    assert places(processes) == []


def test_a_process_with_several_ranks_of_one_communicator_has_none(tmp_path):
    processes = Processes(0, tmp_path)
    processes.add({7: 1})
    for rank in range(4):
        processes.add_communicators(joined(7, rank, 4))
    assert places(processes) == []


def collectives(*rows: tuple[int, int]) -> np.ndarray:
    """pid and device of each."""
    result = layout.empty(layout.COLLECTIVES, len(rows))
    result["pid"], result["device"] = zip(*rows, strict=True)
    return result


def test_the_gpu_selected_by_a_process_is_reported_once(tmp_path):
    """It sees all GPUs: only its calls show which GPU it uses."""
    processes = Processes(0, tmp_path)
    processes.add({7: 1, 8: 1})
    located = processes.update_devices(collectives((7, -1), (7, 3), (7, 3), (8, 0), (8, 1), (9, 2)))
    assert [(each.pid, each.device) for each in located] == [(7, 3)]
    assert processes.update_devices(collectives((7, 3))) == []


def test_a_process_with_several_ranks_is_on_no_gpu(tmp_path):
    processes = Processes(0, tmp_path)
    processes.add({7: 1})
    for rank in range(2):
        processes.add_communicators(joined(7, rank, 2))
    assert processes.update_devices(collectives((7, 0))) == []


def test_ranks_from_the_launcher_take_precedence(tmp_path):
    home = tmp_path / "7"
    home.mkdir()
    (home / "environ").write_bytes(b"RANK=3\0WORLD_SIZE=4\0")
    processes = Processes(0, tmp_path)
    processes.add({7: 1})
    processes.add_communicators(joined(7, 1, 2))
    assert places(processes) == []


def test_a_process_still_runs_only_as_itself():
    child = subprocess.Popen(["sleep", "60"])
    try:
        now_ns = time.monotonic_ns()
        assert still_runs(child.pid, now_ns)
        assert not still_runs(child.pid, now_ns - 60 * 10**9)  # another process had this number
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not still_runs(child.pid, now_ns)  # a zombie
    child.wait()
    assert not still_runs(child.pid, now_ns)
