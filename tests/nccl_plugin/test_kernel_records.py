"""The agent's side of the plugin: it finds the memory of each process, switches it in windows and reads its rows."""

import os

import pytest

from stallscope.capture.gpu.kernel_records import KernelRecords
from stallscope.capture.gpu.nccl_ring import KERNELS, Event
from stallscope.capture.gpu.plugin_windows import GpuTimes, PluginWindows
from stallscope.events.names import GpuKernelFlag, Op

from .test_nccl_plugin import programs, start, wait_for_mask  # noqa: F401  fixtures

pytestmark = pytest.mark.compiler


def test_rows_of_a_running_process_are_delivered_and_the_plugin_is_off_at_the_end(start):  # noqa: F811
    job, ring = start(5)
    records = KernelRecords(3, PluginWindows(GpuTimes.ON))
    pid = job.process.pid
    assert len(records.second([pid, os.getpid()], n_calls=0)) == 0 and records.n_processes == 1
    wait_for_mask(ring, job, KERNELS | Event.PROXY_OP | Event.PROXY_STEP)  # the job spans 2 nodes
    job.does("run 100 4")
    job.does("p2p 10")
    job.does("proxy 2")
    rows = records.second([pid], n_calls=100)
    assert set(rows["pid"]) == {pid} and set(rows["node"]) == {3} and records.take_lost() == 0
    collectives = rows[rows["seq"] >= 0]
    assert set(collectives["op"]) == {Op.ALL_REDUCE} and set(collectives["nranks"]) == {16}
    kernels = collectives[collectives["flags"] & GpuKernelFlag.IS_NETWORK == 0]
    assert (kernels["end_ns"] - kernels["start_ns"])[:100].tolist() == [503] * 100
    assert (rows["op"] == Op.SEND).sum() == 10
    network = rows[rows["flags"] & GpuKernelFlag.IS_NETWORK > 0]
    assert len(network) == 2 and set(network["peer_rank"]) == {2}
    assert (network["network_ns"] >= 3 * 10_000_000).all()
    assert (network["network_ns"] < network["end_ns"] - network["start_ns"]).all()
    records.close()
    wait_for_mask(ring, job, Event(0))


def test_records_of_a_process_that_was_killed_are_delivered(start):  # noqa: F811
    job, ring = start(5)
    records = KernelRecords(0, PluginWindows(GpuTimes.ON))
    records.second([job.process.pid], n_calls=0)
    wait_for_mask(ring, job, KERNELS | Event.PROXY_OP | Event.PROXY_STEP)
    job.does("run 70 2")
    job.process.kill()
    job.process.wait()
    assert len(records.second([], n_calls=0)) == 70 and records.n_processes == 0


def test_records_that_were_overwritten_are_counted_once(start):  # noqa: F811
    job, ring = start(5)
    records = KernelRecords(0, PluginWindows(GpuTimes.ON))
    records.second([job.process.pid], n_calls=0)
    wait_for_mask(ring, job, KERNELS | Event.PROXY_OP | Event.PROXY_STEP)
    job.does("run 40000 1")
    n_rows = len(records.second([job.process.pid], n_calls=0))
    assert n_rows + records.take_lost() == 40_000 and n_rows == 32_768 and records.take_lost() == 0


def schedule(
    windows: PluginWindows, seconds: int, *, n_on: int = 1000, undecided_s: tuple[int, ...] = ()
) -> int:
    """The seconds in which the plugin was on. n_on: collectives a second while it is on, instead of 1000."""
    n, left_s = 0, 0.0
    for second in range(seconds):
        windows.note_calls(n_on if left_s else 1000, is_on=left_s > 0)
        left_s = windows.seconds(float(second), is_undecided=second in undecided_s)
        n += left_s > 0
    return n


def test_windows_stay_within_the_budget_that_is_assumed_before_the_cost_is_measured():
    assert schedule(PluginWindows(), 260) == 3 + 4 * 3  # after 8 s, and each minute: 0.2 % / 4 % of the time


@pytest.mark.parametrize("n_on", [1000, 980, 900, 500], ids=lambda n: f"{n / 10:g} %")
def test_windows_follow_the_measured_cost(n_on: int):
    windows = PluginWindows()
    schedule(windows, 3_600, n_on=n_on)
    cost = min(max(1 - n_on / 1000, 0.01), 0.2)
    assert windows.cost == pytest.approx(cost)
    assert 3 / windows.interval_s == pytest.approx(min(0.002 / cost, 0.1))


def test_an_undecided_diagnosis_opens_one_long_window_in_ten_minutes():
    usual = schedule(PluginWindows(), 900)
    assert schedule(PluginWindows(), 900, undecided_s=(100, 101, 300)) in range(usual + 24, usual + 31)


@pytest.mark.parametrize("mode", [GpuTimes.OFF, GpuTimes.ON])
def test_the_plugin_is_always_off_or_always_on_as_the_setting_states(mode: GpuTimes):
    assert schedule(PluginWindows(mode), 50, undecided_s=(5,)) == 50 * (mode is GpuTimes.ON)
