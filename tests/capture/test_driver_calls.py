"""Calls into the GPU driver: real ioctls of processes, on devices whose major numbers the test calls the driver's."""

import errno
import fcntl
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from stallscope import agent
from stallscope.capture.gpu.driver_calls import DriverCalls
from stallscope.capture.gpu.drivers import Driver, device_name, majors
from stallscope.capture.host import HostEvents
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.maps import Entries
from stallscope.capture.probes.operations import FIRST_IOCTL, SYMBOLS
from stallscope.capture.probes.optional_programs import IOCTL_WAYS
from stallscope.capture.probes.program import Program
from stallscope.capture.rows.call_statistics import CallSums
from stallscope.events import kernel
from stallscope.events.names import HostKind, Op
from stallscope.store import node

from ..patience import PATIENCE_S, until
from .always_on import AlwaysOn

MEMORY = 1
"""Major numbers of /dev/null, /dev/random and of /dev/loop-control on any Linux (Documentation/admin-guide/devices)."""

NULL, RANDOM = os.makedev(MEMORY, 3), os.makedev(MEMORY, 8)
RM_CONTROL = 0xC020462A
ENTROPY = 0x80045200
"""RNDGETENTCNT of linux/random.h: the only call among these that succeeds."""

_MONITOR = """
import contextlib, fcntl, sys
open("/proc/self/comm", "w").write("monitor")
with contextlib.suppress(OSError):
    fcntl.ioctl(open(sys.argv[1]), int(sys.argv[2]))
"""
"""Has gone when its call is counted."""

_CALLER = """
import fcntl, os, sys
def calls(path, command, n):
    fd = os.open(path, os.O_RDONLY)
    for i in range(n):
        try: fcntl.ioctl(fd, command, bytes(64))
        except OSError: pass
    os.close(fd)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Caller:
    """A process that makes ioctls on request."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self.process, self.pid = process, process.pid

    def calls(self, path: Path, command: int, n: int) -> None:
        """Wait until the ioctls have been made."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"calls({str(path)!r}, {command}, {n})\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def caller() -> Iterator[Caller]:
    with subprocess.Popen([sys.executable, "-c", _CALLER], stdin=-1, stdout=-1, text=True) as process:
        yield Caller(process)
        process.kill()


@pytest.fixture
def device(tmp_path: Path) -> Callable[..., Path]:
    """device(number): a character device file of that device."""

    def made(number: int) -> Path:
        path = tmp_path / f"{os.major(number)}-{os.minor(number)}"
        os.mknod(path, 0o600 | stat.S_IFCHR, number)
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            pytest.skip(f"devices of {tmp_path} cannot be opened: {error.strerror}")
        return path

    return made


def counted(program: Program, pid: int) -> dict[str, tuple[int, int]]:
    """Calls and failures of a process, by name."""
    operations = program.operations()
    return {
        SYMBOLS[key["symbol"]]: (int(value["n"]), int(value["n_failed"]))
        for key, value in zip(operations.keys, operations.values, strict=True)
        if key["tgid"] == pid
    }


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
@pytest.mark.parametrize("way", IOCTL_WAYS)
def test_calls_into_the_driver_are_counted_and_no_others(
    way: str, tracing: Callable[..., Program], caller: Caller, device: Callable[..., Path], tmp_path: Path
):
    program = tracing(ioctl_ways=(way,), slow_call_ns=1)
    if way == "function" and not program.ioctl_way:
        # This kernel refuses probes on functions and reports this; tests/kernels tries them on other kernels.
        assert program.missing == ("calls into the GPU driver",)
        return
    assert (program.ioctl_way, program.missing) == (way, ())
    null, random = device(NULL), device(RANDOM)
    caller.calls(null, RM_CONTROL, 5)
    assert counted(program, caller.pid) == {}  # not yet known as the driver's
    program.know_drivers({MEMORY: Driver.NVSWITCH})
    caller.calls(null, RM_CONTROL, 150)
    caller.calls(random, ENTROPY, 70)
    caller.calls(Path("/dev/ptmx"), RM_CONTROL, 20)
    (tmp_path / "file").touch()
    caller.calls(tmp_path / "file", RM_CONTROL, 20)
    file = os.open(null, os.O_RDONLY)
    with suppress(OSError):
        fcntl.ioctl(file, RM_CONTROL, bytes(64))
    os.close(file)
    names = "ioctl:nvidia-nvswitch:0x2a", "ioctl:nvidia-nvswitch:0x0"
    assert counted(program, caller.pid) == {names[0]: (150, 150), names[1]: (70, 0)}
    assert counted(program, os.getpid()) == {}
    operations = program.operations()
    of_caller = operations.values[operations.keys["tgid"] == caller.pid]
    assert (of_caller["histogram"].sum(axis=1) == of_caller["n"]).all()
    assert (of_caller["total_ns"] >= of_caller["max_ns"]).all() and (of_caller["max_ns"] > 0).all()
    rows = HostEvents(0, program.entries, drivers=lambda: {MEMORY: Driver.NVSWITCH}).rows(
        program.events.drain(), [], time.monotonic_ns()
    )
    rows = rows[(rows["pid"] == caller.pid) & (rows["kind"] == HostKind.DRIVER_CALL)]
    assert (
        len(rows) == 220 and (rows["duration_ns"] > 0).all() and set(rows["device"]) == {b"nvidia-nvswitch"}
    )
    assert set(rows["value"][rows["detail"] == names[0].encode()].tolist()) == {-errno.ENOTTY}
    assert set(rows["value"][rows["detail"] == names[1].encode()].tolist()) == {0}
    assert set(rows["comm"]) == {Path(sys.executable).name.encode()}


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_numbers_have_the_names_of_the_drivers_headers(
    tracing: Callable[..., Program], caller: Caller, device: Callable[..., Path]
):
    program, null = tracing(ioctl_ways=tuple(IOCTL_WAYS)), device(NULL)
    expected = {
        Driver.NVIDIA: {RM_CONTROL: "NV_ESC_RM_CONTROL", 0xC04846D2: "NV_ESC_CHECK_VERSION_STR"}
        | {0xC008465F: "nvidia:0x5f", 0x4C82: "nvidia:other"},
        Driver.UVM: {51: "UVM_MIGRATE", 0x30000001: "UVM_INITIALIZE", 239: "nvidia-uvm:0xef"}
        | {240: "nvidia-uvm:other", 2047: "nvidia-uvm:other", 0x4000002A: "nvidia-uvm:other"},
        Driver.NVLINK: {0xC0104E03: "nvidia-nvlink:0x3"},
    }
    n_by_name: dict[str, tuple[int, int]] = {}
    for driver, commands in expected.items():
        program.know_drivers({MEMORY: driver})
        for command, name in commands.items():
            caller.calls(null, command, 3)
            n = n_by_name.get(f"ioctl:{name}", (0, 0))[0] + 3
            n_by_name[f"ioctl:{name}"] = n, n
    program.know_drivers({MEMORY: Driver.NONE})
    caller.calls(null, RM_CONTROL, 3)
    assert counted(program, caller.pid) == n_by_name


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_ioctl_programs_are_loaded_only_on_request(tracing: Callable[..., Program]):
    program = tracing()
    assert not {name for way in IOCTL_WAYS.values() for name in way} & program.costs().keys()
    assert (program.ioctl_way, program.missing) == ("", ())


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_program_that_is_loaded_and_cannot_be_attached_is_named(tracing: Callable[..., Program]):
    program = tracing()
    hook = "nccl_session" if program.mode == "session" else "nccl_enter"
    with pytest.raises(KernelRefused) as refusal:
        program._object.attach(hook)  # its section does not name the tracepoint
    assert refusal.value.program == hook


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_others_than_the_chosen_processes_are_left_out(
    tracing: Callable[..., Program], caller: Caller, device: Callable[..., Path]
):
    program, null = tracing(ioctl_ways=tuple(IOCTL_WAYS), pids=frozenset({os.getppid()})), device(NULL)
    program.know_drivers({MEMORY: Driver.NVIDIA})
    caller.calls(null, RM_CONTROL, 4)
    program.follow([caller.pid])
    caller.calls(null, RM_CONTROL, 6)
    assert counted(program, caller.pid) == {"ioctl:NV_ESC_RM_CONTROL": (6, 6)}


def n_named(db: Path) -> int:
    """Programs in the trace that were not traced."""
    with node.reading(db) as reader:
        return int(reader.execute("SELECT COUNT(*) FROM annotations WHERE label='program'").fetchone()[0])


@pytest.mark.bpf
@pytest.mark.live
def test_a_trace_names_the_processes_that_called_the_driver(
    bpf_object: Path, caller: Caller, device: Callable[..., Path], tmp_path: Path
):
    null, db, out, stop = device(NULL), tmp_path / "trace.db", io.StringIO(), threading.Event()

    def call() -> None:
        try:
            until(lambda: " processes, " in out.getvalue())
            caller.calls(null, RM_CONTROL, 40)
            subprocess.run([sys.executable, "-c", _MONITOR, null, str(RM_CONTROL)], input=b"", check=True)
            until(lambda: n_named(db) > 1)
        finally:
            stop.set()

    calling = threading.Thread(target=call)
    calling.start()
    agent.trace(
        agent.Options(
            db=db,
            node="here",
            gpu_ioctls=True,
            gpu_majors=lambda: {MEMORY: Driver.NVIDIA},
            duration_s=3 * PATIENCE_S,
        ),
        out=out,
        stop=stop,
    )
    calling.join()
    with node.reading(db) as reader:
        facts = json.loads(reader.execute("SELECT facts FROM sessions").fetchone()[0])
        calls = reader.execute(
            "SELECT s.name, o.op, SUM(o.n), SUM(o.n_failed), MIN(o.is_estimate) FROM operations o "
            "JOIN symbols s ON s.symbol = o.symbol WHERE o.pid = ? GROUP BY 1, 2",
            (caller.pid,),
        ).fetchall()
        named = reader.execute("SELECT value FROM annotations WHERE label='program' AND pid=?", (caller.pid,))
        assert named.fetchone()[0] in (Path(sys.executable).name, Path(sys.executable).name.encode())
        assert reader.execute("SELECT COUNT(*) FROM annotations WHERE value='monitor'").fetchone() == (1,)
        assert not reader.execute("SELECT COUNT(*) FROM operations WHERE pid=?", (os.getpid(),)).fetchone()[0]
    assert facts["gpu_ioctls"] in IOCTL_WAYS
    assert calls == [("ioctl:NV_ESC_RM_CONTROL", Op.IOCTL, 40, 40, 0)]


DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
195 nvidia-modeset
234 nvidia-nvswitch
235 nvidia-caps
236 nvidia-nvlink
510 nvidia-uvm

Block devices:
  7 loop
511 nvidia
"""


def test_the_drivers_majors_are_those_of_the_kernels_list(tmp_path: Path):
    (tmp_path / "devices").write_text(DEVICES)
    result = majors(tmp_path)
    assert result == {
        195: Driver.NVIDIA,
        234: Driver.NVSWITCH,
        235: Driver.ANOTHER,
        236: Driver.NVLINK,
        510: Driver.UVM,
    }
    (tmp_path / "devices").write_text(DEVICES.replace("195 nvidia\n", "195 nvidia-frontend\n"))
    assert majors(tmp_path) == result
    assert majors(tmp_path / "nowhere") == {}
    numbers = {"nvidia3": (195, 3), "nvidiactl": (195, 255), "nvidia-modeset": (195, 254)}
    numbers |= {
        "nvidia-uvm": (510, 0),
        "nvidia-uvm-tools": (510, 1),
        "nvidia-nvlink": (236, 0),
        "7:2": (7, 2),
    }
    for name, (major, minor) in numbers.items():
        assert device_name(major << 20 | minor, result) == name


def test_a_driver_that_is_loaded_later_is_registered_then(tmp_path: Path):
    output, now = [], {}
    calls = DriverCalls(output.append, lambda _: "", lambda: dict(now))
    assert "no NVIDIA driver" in calls.refresh() and output == []
    now[195] = Driver.NVIDIA
    assert calls.refresh() == "" and calls.refresh() == ""
    now = {510: Driver.UVM}
    calls.refresh()
    assert output == [{195: Driver.NVIDIA}, {195: Driver.NONE, 510: Driver.UVM}]


def test_an_untraced_caller_is_named_once():
    names = {7: "nvidia-smi", 8: "dcgm-exporter", 9: "python"}
    calls = DriverCalls(lambda _: None, lambda pid: names.get(pid, ""))
    assert [(entry.pid, entry.label, entry.value) for entry in calls.new_labels([7, 8, 9, 10], {9}, 5)] == [
        (7, "program", "nvidia-smi"),
        (8, "program", "dcgm-exporter"),
    ]
    assert calls.new_labels([7, 8, 9], {9}, 6) == []
    calls.forget([7])
    assert [entry.pid for entry in calls.new_labels([7, 8], set(), 7)] == [7]


def test_untraced_callers_are_listed_once_their_process_has_ended(tmp_path: Path):
    (tmp_path / "8").mkdir()
    keys = np.zeros(3, kernel.OPERATION_KEY)
    keys["tgid"], keys["symbol"] = (7, 8, 9), FIRST_IOCTL
    values = np.zeros(3, kernel.OPERATION)
    values["n"] = 1
    nothing = Entries(np.zeros(0, kernel.BALANCE_KEY), np.zeros(0, kernel.BALANCE))
    tallies = CallSums(0, lambda: Entries(keys, values), lambda: nothing, AlwaysOn(0))
    assert tallies.ended_untraced(set(), tmp_path) == []
    assert [len(rows) for _, rows in tallies.rows(5)] == [3, 0]
    assert tallies.ended_untraced({9}, tmp_path) == [7]
    tallies.final_rows([7], 6)
    assert tallies.ended_untraced({9}, tmp_path) == []
