"""The communication libraries of a process are known from its mapped files and thread names."""

from pathlib import Path

import pytest

from stallscope.capture.process.communication_libraries import communication_libraries
from stallscope.capture.process.processes import Processes

SECOND_NS = 10**9


def proc(folder: Path, *files: str, threads: tuple[str, ...] = ("python",), pid: int = 7) -> Path:
    """A /proc with one process that maps these files."""
    process_dir = folder / str(pid)
    for i, name in enumerate(threads):
        (process_dir / "task" / str(pid + i)).mkdir(parents=True, exist_ok=True)
        (process_dir / "task" / str(pid + i) / "comm").write_text(name + "\n")
    lines = [
        f"7f0000{i:06x}-7f0000{i + 1:06x} r-xp 00000000 08:01 {100 + i}   {name}"
        for i, name in enumerate(files)
    ]
    (process_dir / "maps").write_text(
        "\n".join([*lines, "7ffd0000-7ffe0000 rw-p 00000000 00:00 0   [stack]", ""])
    )
    return folder


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/env/lib/libmpi.so.12.3.5", "mpich"),
        ("/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.1", "mpich"),
        ("/env/lib/libmpi.so.40.40.7", "open_mpi"),
        ("/usr/lib/openmpi/libopen-pal.so.40", "open_mpi"),
        ("/opt/intel/oneapi/mpi/2021.13/lib/libmpi.so.12.0", "intel_mpi"),
        ("/opt/cray/pe/lib64/libmpi_gnu_123.so.12", "cray_mpich"),
        ("/env/site-packages/libucx/lib/libucp.so.0.0.0", "ucx"),
        ("/env/site-packages/ucxx.libs/libucp-0a1b2c3d.so.0.0.0", "ucx"),
        ("/opt/hpcx/ucc/lib/libucc.so.1", "ucc"),
        ("/conda/lib/libgloo.so", "gloo"),
        ("/env/nvidia/nccl/lib/libnccl.so.2", "nccl"),
        ("/opt/rocm/lib/librccl.so.1.0", "rccl"),
        ("/env/nvidia/nvshmem/lib/libnvshmem_host.so.3", "nvshmem"),
    ],
)
def test_a_library_is_known_by_its_file(tmp_path: Path, file: str, name: str):
    assert communication_libraries(proc(tmp_path, "/usr/bin/python3", file) / "7") == (name,)


def test_several_libraries_have_a_fixed_order_and_other_files_are_none(tmp_path: Path):
    files = (
        "/x/libucp.so.0",
        "/x/libmpi.so.12",
        "/x/libnccl.so.2",
        "/x/libucp-notes.txt",
        "/x/libmpifort.so.12",
    )
    assert communication_libraries(proc(tmp_path, *files) / "7") == ("nccl", "mpich", "ucx")
    assert (
        communication_libraries(proc(tmp_path / "other", "/x/libmpifort.so.12", "/x/libucs.so.0") / "7") == ()
    )
    assert communication_libraries(tmp_path / "8") == ()


def test_gloo_inside_another_library_is_known_by_its_threads(tmp_path: Path):
    folder = proc(tmp_path, "/env/torch/lib/libtorch_cpu.so", threads=("python", "pt_gloo_runloop"))
    assert communication_libraries(folder / "7") == ("gloo",)


def test_libraries_that_are_loaded_later_are_reported_once(tmp_path: Path):
    processes = Processes(node=0, proc=proc(tmp_path, "/x/libnccl.so.2"))
    (row,) = processes.add({7: 0})
    assert row["libraries"] == b"nccl"
    proc(tmp_path, "/x/libnccl.so.2", "/x/libmpi.so.12")
    assert processes.update_libraries(SECOND_NS // 2) == []
    assert processes.update_libraries(SECOND_NS) == [(7, "nccl, mpich")]
    assert processes.update_libraries(SECOND_NS) == processes.update_libraries(3 * SECOND_NS) == []
    proc(tmp_path, "/x/libmpi.so.12")
    assert processes.update_libraries(10 * SECOND_NS) == []
