"""Ranks from launchers' environments, in a /proc that the test makes and in the real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stallscope.capture.process.process_identity import Identity, identity, launcher_ranks

LAUNCHED = {
    "torchrun": {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
    },
    "slurm": {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"},
    "mpich": {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"},
    "mvapich2": {
        "MV2_COMM_WORLD_RANK": "5",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "8",
    },
    "pals": {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_SIZE": "8"},
    "pmix": {"PMIX_RANK": "5", "PMIX_LOCAL_RANK": "1", "PMIX_SIZE": "8"},
}


def process(proc: Path, pid: int, variables: dict[str, str], devices: tuple[str, ...] = ()) -> Path:
    home = proc / str(pid)
    (home / "fd").mkdir(parents=True)
    (home / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in variables.items()))
    (home / "stat").write_text(f"{pid} (py (x) thon) S 1 " + " ".join(["0"] * 17) + " 4711 0 0\n")
    for i, device in enumerate(devices):
        (home / "fd" / str(i)).symlink_to(device)
    return proc


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_each_launcher_provides_rank_local_rank_and_world_size(launcher):
    assert launcher_ranks(LAUNCHED[launcher]) == (5, 1, 8)


def test_torchrun_variables_take_precedence_inside_a_slurm_step():
    """srun starts one torchrun per node: its own task number is not a rank of the job."""
    slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    assert launcher_ranks(slurm | LAUNCHED["torchrun"]) == (5, 1, 8)


@pytest.mark.parametrize("rank", ["", "-1", "one", "5.0", "9" * 5000, "٣", "8"])
def test_an_invalid_rank_is_unknown(rank):
    """8 is not a rank either: there are 8 ranks, from 0."""
    assert launcher_ranks({"RANK": rank, "LOCAL_RANK": "1", "WORLD_SIZE": "8"}) == (-1, -1, -1)


def test_a_rank_without_a_world_size_stays_a_rank():
    assert launcher_ranks({"RANK": "5"}) == (5, -1, -1)


def test_name_and_start_are_read_past_brackets_in_the_name(tmp_path):
    result = identity(7, process(tmp_path, 7, LAUNCHED["torchrun"]))
    assert result == Identity(7, 5, 1, 8, comm="py (x) thon", started_ticks=4711)


def test_the_only_visible_gpu_is_the_device(tmp_path):
    assert identity(7, process(tmp_path, 7, {"CUDA_VISIBLE_DEVICES": "3"})).device == 3


def test_in_a_container_the_opened_gpu_is_the_device_not_the_number_it_has_there(tmp_path):
    proc = process(tmp_path, 7, {"CUDA_VISIBLE_DEVICES": "0"}, ("/dev/nvidia6", "/dev/nvidiactl"))
    assert identity(7, proc).device == 6


@pytest.mark.parametrize(("visible_gpus", "device"), [("3", 3), ("0", -1)])
def test_a_process_with_several_open_gpus_uses_the_visible_gpu(tmp_path, visible_gpus, device):
    opened = ("/dev/nvidia2", "/dev/nvidia3")
    assert identity(7, process(tmp_path, 7, {"CUDA_VISIBLE_DEVICES": visible_gpus}, opened)).device == device


def test_the_only_opened_gpu_is_the_device(tmp_path):
    proc = process(tmp_path, 7, {}, ("/dev/nvidiactl", "/dev/nvidia2", "/dev/nvidia-uvm", "/dev/nvidia2"))
    assert identity(7, proc).device == 2


@pytest.mark.parametrize("visible_gpus", ["0,1", "GPU-8f6d", ""])
def test_with_several_gpus_the_device_is_unknown(tmp_path, visible_gpus):
    proc = process(tmp_path, 7, {"CUDA_VISIBLE_DEVICES": visible_gpus}, ("/dev/nvidia0", "/dev/nvidia1"))
    assert identity(7, proc).device == -1


def test_a_process_that_has_gone_is_unknown(tmp_path):
    assert identity(7, tmp_path) == Identity(7)


def test_the_identity_of_a_real_process_is_read_from_proc():
    environment = os.environ | {"RANK": "2", "WORLD_SIZE": "4"}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, text=True) as child:
        child.stdout.readline()
        result = identity(child.pid)
        child.communicate("\n")
    assert (result.rank, result.local_rank, result.nranks) == (2, -1, 4)
    assert result.comm.startswith("python")
    assert result.started_ticks > 0
