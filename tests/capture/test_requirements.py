"""Missing requirements are named, on simulated machines."""

import os
from pathlib import Path

import pytest

from stallscope.capture.probes import preflight
from stallscope.errors import CannotTrace, NotFound

BPF, PERFMON, PTRACE, ADMIN = 1 << 39, 1 << 38, 1 << 19, 1 << 21


def machine(root: Path, effective: int, *, has_btf: bool = True, uid: int = 1000) -> tuple[Path, Path]:
    proc, sys = root / "proc", root / "sys"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "status").write_text(
        f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nCapPrm:\t0\nCapEff:\t{effective:016x}\n"
    )
    (sys / "kernel" / "btf").mkdir(parents=True)
    if has_btf:
        (sys / "kernel" / "btf" / "vmlinux").touch()
    return proc, sys


@pytest.mark.parametrize("effective", [BPF | PERFMON | PTRACE, ADMIN | PTRACE, (1 << 41) - 1])
def test_enough_is_enough(tmp_path, effective):
    preflight.check(*machine(tmp_path, effective), "x86_64")


@pytest.mark.parametrize(
    ("effective", "named", "not_named"),
    [
        (0, ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE", "sudo"], []),
        (BPF | PTRACE, ["CAP_PERFMON"], ["CAP_BPF", "CAP_SYS_PTRACE"]),
        (ADMIN, ["CAP_SYS_PTRACE"], ["CAP_BPF", "CAP_PERFMON"]),
    ],
)
def test_missing_capabilities_are_named(tmp_path, effective, named, not_named):
    with pytest.raises(CannotTrace) as caught:
        preflight.check(*machine(tmp_path, effective), "x86_64")
    assert all(word in str(caught.value) for word in named)
    assert not any(word in str(caught.value) for word in not_named)
    assert "\n" not in str(caught.value)


def test_root_in_a_container_is_advised_to_add_capabilities(tmp_path):
    with pytest.raises(CannotTrace, match="--cap-add CHECKPOINT_RESTORE"):
        preflight.check(*machine(tmp_path, 0, uid=0), "x86_64")


def test_a_kernel_without_btf_is_named(tmp_path):
    with pytest.raises(CannotTrace, match="without BTF"):
        preflight.check(*machine(tmp_path, ADMIN | PTRACE, has_btf=False), "x86_64")


def test_process_numbers_of_a_container_are_named(tmp_path):
    proc, sys = machine(tmp_path, ADMIN | PTRACE)
    (proc / "self" / "ns").mkdir()
    (proc / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
    preflight.check(proc, sys, "x86_64")
    (proc / "self" / "ns" / "pid").unlink()
    (proc / "self" / "ns" / "pid").symlink_to("pid:[4026532295]")
    with pytest.raises(CannotTrace, match="--pid=host"):
        preflight.check(proc, sys, "x86_64")


def test_another_architecture_is_named(tmp_path):
    with pytest.raises(CannotTrace, match="riscv64"):
        preflight.check(*machine(tmp_path, ADMIN | PTRACE), "riscv64")


def test_a_process_that_does_not_exist_is_named():
    preflight.check_pids([os.getpid()])
    with pytest.raises(NotFound, match="4194999"):
        preflight.check_pids([os.getpid(), 4194999])


@pytest.mark.parametrize("release", ["5.10.0-32-cloud-amd64", "4.18.0-553.el8_10.x86_64"])
def test_an_unsupported_old_kernel_is_reported(release):
    with pytest.raises(CannotTrace, match=r"5\.15 or newer") as caught:
        preflight.check_age(release)
    assert release in str(caught.value)


@pytest.mark.parametrize("release", ["5.15.0-1075-aws", "6.1.0-56-cloud-amd64", "7.2.12+deb14-amd64"])
def test_a_kernel_that_refuses_for_another_reason_is_not_called_old(release):
    preflight.check_age(release)
