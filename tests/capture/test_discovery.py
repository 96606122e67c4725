"""Real processes that load libraries compiled by the test, in every form in which a library occurs."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stallscope.capture.probes import elf
from stallscope.capture.probes.discovery import Discovery, Library, Mapping, functions, is_gpu_library

pytestmark = pytest.mark.compiler

CUDART = "int cudaStreamSynchronize(void *s) { return 0; }\nint cudaMalloc(void *p) { return 0; }\n"
NCCL = "int ncclAllReduce(void *s) { return 0; }\nint pncclAllReduce(void *s) { return 0; }\n"
OTHER = "int unrelated(void) { return 0; }\n"
LOADER = (
    "import ctypes, sys\nfor line in sys.stdin:\n    ctypes.CDLL(line.strip()); print('ok', flush=True)\n"
)


def library(path: Path, source: str, *flags: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-O1", "-shared", "-fPIC", *flags, "-o", str(path), "-xc", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@contextmanager
def process(*libraries: Path, command: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has loaded the libraries, and loads more on load()."""
    command = command or (sys.executable, "-c", LOADER)
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as child:
        try:
            for each in libraries:
                load(child, each)
            yield child
        finally:
            child.kill()


def load(child: subprocess.Popen[str], path: Path) -> None:
    child.stdin.write(f"{path}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "ok\n"


def looking_at(*children: subprocess.Popen[str], **options) -> Discovery:
    return Discovery(pids=frozenset(child.pid for child in children), **options)


def names(libraries: list[Library]) -> list[str]:
    return sorted(Path(library.name).name for library in libraries)


def everything(discovery: Discovery, built: Path, now_ns: int = 0) -> list[Library]:
    """The libraries built by this test that a scan of the machine finds."""
    return [library for library in discovery.scan(now_ns) if library.name.startswith(f"{built}/")]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("/venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2", True),
        ("/opt/torch/lib/libcudart-d0da41ae.so.11.0", True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05", True),
        ("/x/libcudart.so", True),
        ("/x/libnccl-net.so", False),
        ("/x/libcudadebugger.so.1", False),
        ("/x/libcuda.so.1.bak", False),
        ("/x/mylibcuda.so", False),
    ],
)
def test_libraries_are_known_by_name(name, is_one):
    assert is_gpu_library(Mapping("0-1", "08:01", 1, name, False)) is is_one


def test_libraries_of_a_running_process_are_discovered_once(tmp_path):
    nccl = library(tmp_path / "my env" / "libnccl.so.2", NCCL)
    cudart = library(tmp_path / "conda" / "libcudart-0a1b2c.so.12", CUDART)
    with process(nccl, cudart) as child:
        discovery = Discovery()
        result = everything(discovery, tmp_path)
        assert names(result) == ["libcudart-0a1b2c.so.12", "libnccl.so.2"]
        assert {library.pid for library in result} == {child.pid}
        assert child.pid in discovery.gpu_processes()
        assert everything(discovery, tmp_path, 10**12) == []


def test_a_process_without_gpu_libraries_is_not_searched(tmp_path):
    with process(library(tmp_path / "libmine.so", NCCL)):
        assert everything(Discovery(), tmp_path) == []


def test_a_chosen_process_is_searched_whatever_its_libraries_are_called(tmp_path):
    with process(library(tmp_path / "libmine.so", NCCL), library(tmp_path / "libother.so", OTHER)) as child:
        assert names(looking_at(child).scan(0)) == ["libmine.so"]


def test_a_renamed_copy_is_discovered_in_a_process_with_a_gpu_library(tmp_path):
    cuda = library(tmp_path / "libcuda.so.1", OTHER)
    with process(cuda, library(tmp_path / "libmine.so", NCCL), library(tmp_path / "libother.so", OTHER)):
        assert names(everything(Discovery(), tmp_path)) == ["libcuda.so.1", "libmine.so"]


def test_functions_linked_in_statically_are_found(tmp_path):
    source = (
        CUDART.replace("int cuda", "static int cuda") + "void *use[] = {cudaMalloc, cudaStreamSynchronize};"
    )
    own_rows = library(tmp_path / "libmine.so", source)
    with process(library(tmp_path / "libcuda.so.1", OTHER), own_rows):
        result = {Path(each.name).name: each for each in everything(Discovery(), tmp_path)}
        assert result["libmine.so"].is_static
        assert not result["libcuda.so.1"].is_static
        with elf.open_image(result["libmine.so"].path) as image:
            assert set(functions(image, ["cudaMalloc", "cudaFree"], is_static=True)) == {"cudaMalloc"}
            assert functions(image, ["cudaMalloc"], is_static=False) == {}


def test_a_deleted_library_is_discovered_and_opened(tmp_path):
    nccl = library(tmp_path / "libnccl.so.2", NCCL)
    inode = nccl.stat().st_ino
    with process(nccl):
        nccl.unlink()
        library(tmp_path / "libnccl.so.2", OTHER)  # an upgrade: another file under the same name
        (result,) = everything(Discovery(), tmp_path)
        assert result.key.inode == inode
        with elf.open_image(result.path) as image:
            assert set(functions(image, ["ncclAllReduce"], is_static=False)) == {"ncclAllReduce"}


def test_a_file_under_several_names_is_one_file(tmp_path):
    nccl = library(tmp_path / "a" / "libnccl.so.2", NCCL)
    link = tmp_path / "b" / "libnccl.so.2"
    link.parent.mkdir()
    os.link(nccl, link)
    with process(nccl) as entry, process(link) as other:
        assert len(looking_at(entry, other).scan(0)) == 1


def test_two_different_files_of_one_name_are_two(tmp_path):
    first = library(tmp_path / "a" / "libnccl.so.2", NCCL)
    second = library(tmp_path / "b" / "libnccl.so.2", NCCL + OTHER)
    with process(first) as entry, process(second) as other:
        assert len(looking_at(entry, other).scan(0)) == 2


def test_a_library_loaded_later_is_discovered_by_the_next_scan(tmp_path):
    cudart, nccl = library(tmp_path / "libcudart.so.12", CUDART), library(tmp_path / "libnccl.so.2", NCCL)
    with process(cudart) as child:
        discovery = looking_at(child)
        assert names(discovery.scan(0)) == ["libcudart.so.12"]
        load(child, nccl)
        assert names(discovery.scan(150 * 10**6)) == ["libnccl.so.2"]


def test_an_old_process_is_looked_at_every_second(tmp_path):
    with process() as child:
        discovery = looking_at(child)
        minute = 60 * 10**9
        assert discovery.scan(0) == [] == discovery.scan(minute)
        load(child, library(tmp_path / "libnccl.so.2", NCCL))
        assert discovery.scan(minute + 5 * 10**8) == []
        assert names(discovery.scan(minute + 10**9)) == ["libnccl.so.2"]


def test_a_process_that_starts_later_is_found(tmp_path):
    nccl = library(tmp_path / "libnccl.so.2", NCCL)
    discovery = Discovery()
    assert everything(discovery, tmp_path) == []
    with process(nccl) as child:
        result = everything(discovery, tmp_path, 10**9)
        assert [library.pid for library in result] == [child.pid]
    discovery.scan(2 * 10**9)
    assert child.pid not in discovery.gpu_processes()


def test_the_tracer_itself_is_left_out(tmp_path):
    with process(library(tmp_path / "libnccl.so.2", NCCL)) as child:
        assert everything(Discovery(ignored=frozenset({child.pid})), tmp_path) == []


def test_descendants_of_a_chosen_process_belong_to_it(tmp_path):
    nccl = library(tmp_path / "libnccl.so.2", NCCL)
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOADER!r}])"
    with (
        process(nccl, command=(sys.executable, "-c", launcher)) as chosen,
        process(library(tmp_path / "b" / "libnccl.so.2", NCCL + OTHER)),
    ):
        (scan,) = looking_at(chosen).scan(0)
        assert scan.pid != chosen.pid
        assert scan.name == str(nccl)
        os.kill(scan.pid, 9)


def test_a_forgotten_file_is_discovered_again(tmp_path):
    with process(library(tmp_path / "libnccl.so.2", NCCL)) as child:
        discovery = looking_at(child)
        (scan,) = discovery.scan(0)
        assert discovery.scan(10**9) == []
        discovery.forget(scan.key)
        assert discovery.scan(2 * 10**9) == [scan]


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mount namespaces need root and unshare(1)"
)


@needs_mounts
def test_a_file_visible_only_in_a_container_is_discovered_and_opened(tmp_path):
    library(tmp_path / "image" / "libnccl.so.2", NCCL)
    (tmp_path / "inside").mkdir()
    script = f'mount --bind {tmp_path}/image {tmp_path}/inside && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", LOADER)
    with process(tmp_path / "inside" / "libnccl.so.2", command=command) as child:
        (scan,) = looking_at(child).scan(0)
        assert not (tmp_path / "inside" / "libnccl.so.2").exists()
        with elf.open_image(scan.path) as image:
            assert set(functions(image, ["ncclAllReduce"], is_static=False)) == {"ncclAllReduce"}


@needs_mounts
def test_two_containers_of_one_image_show_one_file(tmp_path):
    """Overlay mounts give one inode under two devices; attaching twice would count every call twice."""
    library(tmp_path / "image" / "libnccl.so.2", NCCL)
    children = []
    for name in ("one", "two"):
        for part in ("upper", "work", "merged"):
            (tmp_path / name / part).mkdir(parents=True)
        at = tmp_path / name
        options = f"lowerdir={tmp_path}/image,upperdir={at}/upper,workdir={at}/work"
        tmpfs = f"mount -t tmpfs x {at} && mkdir {at}/upper {at}/work {at}/merged"
        script = f'{tmpfs} && mount -t overlay x -o {options} {at}/merged && exec "$@"'
        children.append(("unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", LOADER))
    with process(command=children[0]) as entry, process(command=children[1]) as two:
        load(entry, tmp_path / "one" / "merged" / "libnccl.so.2")
        load(two, tmp_path / "two" / "merged" / "libnccl.so.2")
        assert len(looking_at(entry, two).scan(0)) == 1


def test_a_scan_without_new_processes_is_cheap():
    """Twenty-five a second must stay under 1 % of a core: 400 us each. The best of many, on a busy machine."""
    discovery = Discovery()
    discovery.scan(0)
    spent_ns = []
    for i in range(50):
        begin_ns = time.thread_time_ns()
        discovery.scan(10**6 * i)
        spent_ns.append(time.thread_time_ns() - begin_ns)
    assert min(spent_ns) < 400_000
