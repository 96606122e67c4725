"""Each subject: pass, warning, failure, and the remedy."""

import socket
import ssl
import threading
from pathlib import Path

import pytest
import trustme

from stallscope.check import gpus, hub_connection, kernel_support, libraries, storage, wall_clock
from stallscope.check.finding import Finding, State
from stallscope.check.kernel_support import Loaded
from stallscope.errors import CannotTrace
from stallscope.events.trace import WallClock

ALL_CAPABILITIES = "000001ffffffffff"
LIBRARY_LINE = "7f0000000000-7f0000010000 r-xp 00000000 08:01 {inode} {path}\n"


def fake_proc(root: Path, *, capabilities: str = ALL_CAPABILITIES, scope: str = "1") -> Path:
    """A /proc with this process in it."""
    (root / "self/ns").mkdir(parents=True)
    (root / "self/status").write_text(f"Uid:\t1000 0 0 0\nCapEff:\t{capabilities}\n")
    (root / "self/ns/pid").symlink_to("pid:[4026531836]")
    (root / "sys/kernel/yama").mkdir(parents=True)
    (root / "sys/kernel/yama/ptrace_scope").write_text(scope)
    return root


def fake_sys(root: Path, *, lockdown: str = "[none] integrity confidentiality") -> Path:
    (root / "kernel/btf").mkdir(parents=True)
    (root / "kernel/btf/vmlinux").write_bytes(b"x")
    (root / "kernel/security").mkdir(parents=True)
    (root / "kernel/security/lockdown").write_text(lockdown)
    return root


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    for entry in findings:
        assert bool(entry.advice) == (entry.state is not State.PASS), entry
        assert "\n" not in entry.found + entry.advice
    return {entry.subject: entry for entry in findings}


def kernel_says(
    tmp_path: Path, load=lambda: Loaded("multi"), *, sys: Path | None = None, **proc: str
) -> dict[str, Finding]:
    where = fake_proc(tmp_path / "proc", **proc)
    return by_subject(list(kernel_support.findings(where, sys or fake_sys(tmp_path / "sys"), load=load)))


def test_a_good_kernel_passes(tmp_path):
    assert {kernel_say.state for kernel_say in kernel_says(tmp_path).values()} == {State.PASS}


def test_missing_capabilities_are_named_and_the_programs_not_tried(tmp_path):
    def load() -> Loaded:
        raise AssertionError

    result = kernel_says(tmp_path, load, capabilities="0000000000000000")
    assert result["capabilities"].state is State.FAIL
    assert "CAP_BPF" in result["capabilities"].found
    assert "sudo stallscope check" in result["capabilities"].advice


def test_a_kernel_without_type_information_fails(tmp_path):
    (tmp_path / "bare").mkdir()
    assert kernel_says(tmp_path, sys=tmp_path / "bare")["BTF"].state is State.FAIL


def test_a_refusal_of_bpf_programs_by_the_kernel_is_reported(tmp_path):
    def load() -> Loaded:
        raise CannotTrace("the kernel refused: too many instructions")

    assert "too many instructions" in kernel_says(tmp_path, load)["BPF programs"].found


def test_dear_hooks_warn(tmp_path):
    assert kernel_says(tmp_path, lambda: Loaded("perf"))["BPF programs"].state is State.WARN


def test_blocking_lockdown_and_yama_settings_are_reported(tmp_path):
    strict = fake_sys(tmp_path / "strict", lockdown="none integrity [confidentiality]")
    result = kernel_says(tmp_path, sys=strict, scope="3")
    assert result["lockdown"].state is State.FAIL
    assert "ptrace_scope is 3" in result["stacks"].found


@pytest.mark.parametrize(
    ("scope", "peeks", "state", "message"),
    [
        ("1", True, State.PASS, "Python and native"),
        ("3", True, State.PASS, "by BPF"),
        ("1", False, State.WARN, "Python only"),
        ("3", False, State.WARN, "none: kernel.yama.ptrace_scope is 3"),
    ],
)
def test_the_available_kinds_of_stacks_are_reported(tmp_path, scope, peeks, state, message):
    loaded = Loaded("session", peeks=peeks, is_x86=True)
    stacks = kernel_says(tmp_path, lambda: loaded, scope=scope)["stacks"]
    assert stacks.state is state
    assert message in stacks.found


@pytest.mark.parametrize(
    ("way", "devices", "message"),
    [
        ("function", "195 nvidia\n", "by a probe on ioctl alone"),
        ("tracepoint", "195 nvidia\n", "by the tracepoints of all system calls"),
        ("function", "  1 mem\n", "no NVIDIA driver in /proc/devices"),
        ("", "195 nvidia\n", "cannot be counted on this kernel"),
    ],
)
def test_the_method_that_counts_driver_calls_is_reported(tmp_path, way, devices, message):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text(f"Character devices:\n{devices}")
    kernel_say = kernel_says(tmp_path, lambda: Loaded("session", ioctl_way=way))["driver calls"]
    assert kernel_say.state is State.PASS
    assert message in kernel_say.found


def test_the_driver_version_is_read(tmp_path):
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    (tmp_path / "driver/nvidia/version").write_text(text)
    assert gpus.driver_version(tmp_path) == "580.95.05"
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat"
    )
    assert gpus.driver_version(tmp_path) == "535.104.05"
    assert by_subject(list(gpus.findings(tmp_path / "none")))["driver"].state is State.WARN


@pytest.mark.parametrize(
    ("is_synchronised", "error_us", "state"),
    [(True, 500, State.PASS), (True, 2_000_000, State.WARN), (False, 500, State.WARN)],
)
def test_a_synchronised_clock_passes(is_synchronised, error_us, state):
    reading = WallClock(is_synchronised, error_us, 10, 0.0, 0)
    assert by_subject(list(wall_clock.findings(lambda: reading)))["clock"].state is state


def test_a_clock_that_may_not_be_asked_warns():
    def refuse() -> WallClock:
        raise OSError(1, "not permitted")

    assert "not permitted" in by_subject(list(wall_clock.findings(refuse)))["clock"].found


def test_storage_needs_a_folder_and_room(tmp_path):
    (finding,) = storage.findings(tmp_path / "new/trace.db", 10**6)
    assert finding.state is State.PASS
    (finding,) = storage.findings(tmp_path / "trace.db", 10**18)
    assert finding.state is State.WARN
    (tmp_path / "file").write_text("x")
    (finding,) = storage.findings(tmp_path / "file/trace.db", 10**6)
    assert finding.state is State.FAIL


def test_the_library_and_python_of_a_process_are_found(tmp_path, compiled_nccl):
    home = tmp_path / "77"
    (home / "ns").mkdir(parents=True)
    (home / "root").symlink_to("/")
    inode = compiled_nccl.stat().st_ino
    python = LIBRARY_LINE.format(inode=1, path="/usr/bin/python3.11")
    (home / "maps").write_text(LIBRARY_LINE.format(inode=inode, path=compiled_nccl) + python)
    (home / "statm").write_text("100 1 1 1 0 1 0\n")
    (home / "stat").write_text("77 (python) S 1 " + "0 " * 40)
    (tmp_path / "loadavg").write_text("0 0 0 1/1 77\n")
    subject = by_subject(list(libraries.findings(tmp_path)))
    assert subject[compiled_nccl.name].state is State.PASS
    assert "process 77 (in a virtual environment): 2 functions" in subject[compiled_nccl.name].found
    assert subject["Python"].found == "3.11 in 1 process that use a GPU"


def test_without_gpu_processes_the_job_is_to_be_started(tmp_path):
    (tmp_path / "loadavg").write_text("0 0 0 1/1 1\n")
    (finding,) = libraries.findings(tmp_path)
    assert (finding.subject, finding.state) == ("libraries", State.WARN)


@pytest.fixture
def compiled_nccl(tmp_path, request):
    """A library called libnccl with two functions that are traced."""
    import shutil
    import subprocess

    if not shutil.which("gcc"):
        pytest.skip("compiler: no gcc to build the libraries that are looked at")
    folder = tmp_path / "lib/python3.11/site-packages/nvidia"
    folder.mkdir(parents=True)
    source = folder / "x.c"
    source.write_text("int ncclAllReduce(void) { return 0; }\nint ncclCommDestroy(void) { return 0; }\n")
    library = folder / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_a_missing_hub_passes():
    (finding,) = hub_connection.findings("")
    assert finding.state is State.PASS


@pytest.fixture
def tls_server(tmp_path):
    """A port with TLS for localhost, and the file of its authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    listening = socket.create_server(("localhost", 0))

    def answer() -> None:
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            with plain:
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    continue

    thread = threading.Thread(target=answer)
    thread.start()
    yield listening.getsockname()[1], tmp_path / "ca.pem"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def test_a_hub_with_a_known_certificate_passes(tls_server):
    port, ca_file = tls_server
    (finding,) = hub_connection.findings(f"localhost:{port}", ca_file)
    assert finding.state is State.PASS
    assert "TLSv1.3" in finding.found


def test_a_hub_with_a_strange_certificate_fails(tls_server):
    (finding,) = hub_connection.findings(f"localhost:{tls_server[0]}")
    assert finding.state is State.FAIL
    assert "--ca-cert" in finding.advice


def test_a_hub_that_does_not_answer_fails(tmp_path):
    for name in ("localhost:1", "nonsense", "localhost:http"):
        (finding,) = hub_connection.findings(name)
        assert finding.state is State.FAIL
    (finding,) = hub_connection.findings("localhost:1", tmp_path / "none.pem")
    assert "none.pem" in finding.found


def test_a_token_that_others_can_read_warns(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    assert list(hub_connection.findings("localhost:1", None, token))[1].state is State.WARN
    token.chmod(0o600)
    assert list(hub_connection.findings("localhost:1", None, token))[1].state is State.PASS
    assert list(hub_connection.findings("localhost:1", None, tmp_path / "none"))[1].state is State.FAIL


def test_each_gpu_has_a_finding_and_a_lost_gpu_is_a_warning(tmp_path, fake_gpus):
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  x"
    )
    whole = {"uuid": "GPU-a", "name": "H100", "memory_total_bytes": 80 << 30, "memory_used_bytes": 8 << 30}
    fake_gpus.have(whole, whole | {"lost": 1})
    subject = by_subject(list(gpus.findings(tmp_path)))
    assert subject["GPU 0"].state is State.PASS and "8.0 of 80 GiB" in subject["GPU 0"].found
    assert subject["GPU 1"].state is State.WARN
    fake_gpus.have(driver="driver missing 1")
    assert by_subject(list(gpus.findings(tmp_path)))["GPUs"].state is State.WARN
