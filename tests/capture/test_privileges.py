"""The capabilities that are kept; a drop is permanent and applies to all threads."""

import os
import subprocess
import sys

import pytest

from stallscope.capture.probes import privileges
from stallscope.capture.probes.preflight import Capability
from stallscope.capture.probes.privileges import ALWAYS_NEEDED, needed_capabilities

ALL = frozenset(range(41))


def test_five_capabilities_are_kept_with_multi_links():
    assert (
        needed_capabilities(ALL, "session", chowns=False)
        == needed_capabilities(ALL, "multi", chowns=False)
        == ALWAYS_NEEDED
    )
    assert len(ALWAYS_NEEDED) == 5


def test_single_uprobes_need_one_more():
    assert needed_capabilities(ALL, "perf", chowns=False) == ALWAYS_NEEDED | {Capability.CAP_SYS_ADMIN}


def test_the_substitutes_of_missing_capabilities_are_kept():
    old = frozenset({Capability.CAP_SYS_ADMIN, Capability.CAP_SYS_PTRACE, Capability.CAP_DAC_OVERRIDE})
    assert needed_capabilities(old | {Capability.CAP_CHOWN}, "session", chowns=False) == old


def test_only_held_capabilities_are_kept():
    assert needed_capabilities(frozenset({Capability.CAP_BPF}), "perf", ports=[80], chowns=True) == {
        Capability.CAP_BPF
    }


def test_low_ports_groups_and_folders_of_others_need_their_own(tmp_path):
    assert needed_capabilities(ALL, "session", ports=[443, 8443], chowns=False) - ALWAYS_NEEDED == {
        Capability.CAP_NET_BIND_SERVICE
    }
    assert needed_capabilities(ALL, "session", ports=[0, 8443], chowns=True) - ALWAYS_NEEDED == {
        Capability.CAP_CHOWN
    }
    assert (
        needed_capabilities(ALL, "session", written_paths=[tmp_path, tmp_path / "none"], chowns=False)
        == ALWAYS_NEEDED
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="root: a folder of somebody else's")
def test_writing_into_a_foreign_folder_keeps_additional_capabilities(tmp_path):
    os.chown(tmp_path, 65534, 65534)
    more = needed_capabilities(ALL, "session", written_paths=[tmp_path], chowns=False) - ALWAYS_NEEDED
    assert more == {Capability.CAP_DAC_OVERRIDE, Capability.CAP_CHOWN}
    tmp_path.chmod(0o777)
    assert needed_capabilities(ALL, "session", written_paths=[tmp_path], chowns=False) == ALWAYS_NEEDED


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


def test_dropped_capabilities_stay_dropped_in_threads_and_programs():
    held = privileges.held_capabilities()
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
