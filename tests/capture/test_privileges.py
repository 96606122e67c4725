"""The capabilities that are kept; a drop is permanent and applies to all threads."""

import os
import subprocess
import sys

import pytest

from stallscope.capture.probes import privileges
from stallscope.capture.probes.preflight import Capability
from stallscope.capture.probes.privileges import KEPT, kept

ALL = frozenset(range(41))


def test_five_are_kept_where_the_kernel_has_multi_links():
    assert kept(ALL, "session", chowns=False) == kept(ALL, "multi", chowns=False) == KEPT
    assert len(KEPT) == 5


def test_single_uprobes_need_one_more():
    assert kept(ALL, "perf", chowns=False) == KEPT | {Capability.CAP_SYS_ADMIN}


def test_what_stands_for_a_missing_one_is_kept():
    old = frozenset({Capability.CAP_SYS_ADMIN, Capability.CAP_SYS_PTRACE, Capability.CAP_DAC_OVERRIDE})
    assert kept(old | {Capability.CAP_CHOWN}, "session", chowns=False) == old


def test_nothing_is_kept_that_was_not_held():
    assert kept(frozenset({Capability.CAP_BPF}), "perf", ports=[80], chowns=True) == {Capability.CAP_BPF}


def test_low_ports_groups_and_folders_of_others_need_their_own(tmp_path):
    assert kept(ALL, "session", ports=[443, 8443], chowns=False) - KEPT == {Capability.CAP_NET_BIND_SERVICE}
    assert kept(ALL, "session", ports=[0, 8443], chowns=True) - KEPT == {Capability.CAP_CHOWN}
    assert kept(ALL, "session", written=[tmp_path, tmp_path / "none"], chowns=False) == KEPT


@pytest.mark.skipif(os.geteuid() != 0, reason="root: a folder of somebody else's")
def test_writing_into_a_folder_of_somebody_else_needs_its_own(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    more = kept(ALL, "session", written=[tmp_path], chowns=False) - KEPT
    assert more == {Capability.CAP_DAC_OVERRIDE, Capability.CAP_CHOWN}
    tmp_path.chmod(0o777)
    assert kept(ALL, "session", written=[tmp_path], chowns=False) == KEPT


@pytest.mark.parametrize(
    ("address", "port"), [("", 0), (":8443", 8443), ("0.0.0.0:80", 80), ("[::1]:443", 443), ("host", 0)]
)
def test_the_port_of_an_address(address, port):
    assert privileges.port(address) == port


DROPPED = """
import os, subprocess, sys, threading
from stallscope.capture.probes import privileges
privileges.drop_all_but(frozenset(map(int, sys.argv[1:])))
print(*open("/proc/self/status"))
threading.Thread(target=lambda: print(*open("/proc/thread-self/status"))).start()
print(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
"""


def test_what_is_dropped_does_not_come_back_in_threads_or_programs():
    held = privileges.held()
    wanted = held & {Capability.CAP_NET_BIND_SERVICE, Capability.CAP_SYS_PTRACE}
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, *map(str, sorted(wanted))],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    for name in ("CapEff", "CapPrm"):
        masks = [line.split()[1] for line in done.stdout.splitlines() if line.strip().startswith(name)]
        assert len(masks) == 3
        assert {int(mask, 16) for mask in masks} <= {sum(1 << bit for bit in wanted), 0}
        assert int(masks[0], 16) == sum(1 << bit for bit in wanted)
