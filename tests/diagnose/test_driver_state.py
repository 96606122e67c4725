"""GPU states from the driver explain verdicts and never create a verdict."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.evidence_fields import CauseEvidence, VerdictEvidence
from stallscope.diagnose.gpu.driver_state import gpu_readings
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.stream import Retention, Stream
from stallscope.diagnose.stream.gpu_drivers import Drivers
from stallscope.diagnose.verdicts.gpu_driver import with_gpu_states
from stallscope.events import layout
from stallscope.events.trace import Clock, Trace

from .builders import MS, START_NS, Job, data_parallel, every, trace_of
from .cutting import Cut, batches, told
from .reports import report_of

RUNS_AHEAD = data_parallel(work_ns=500_000, gpu_ns=3 * MS)
SLOW = {(2, step): 4 * MS for step in range(10, 60)}
N_RANKS = 4


def slow_trace() -> Trace:
    return trace_of(Job(RUNS_AHEAD, n_steps=60, gpu_late_ns=SLOW, has_gpu_times=True))


def with_gpus(trace: Trace, *, foreign: int | None = None, **of_rank_2: int) -> Trace:
    """One GPU per rank, all at 1,980 MHz and under load; rank 2's GPU as given. foreign: another process on it."""
    rows = layout.empty(layout.GPUS, N_RANKS)
    rows["ts_ns"], rows["gpu"], rows["sm_mhz"], rows["utilization_percent"] = (
        START_NS,
        range(N_RANKS),
        1980,
        99,
    )
    rows["clock_reasons"], rows["pcie_generation"], rows["n_nvlinks_up"] = 0, 1, 12
    for name, value in of_rank_2.items():
        rows[name][2] = value
    pids = {int(p["rank"]): int(p["pid"]) for p in trace.processes}
    on = layout.empty(layout.GPU_PROCESSES, N_RANKS + (foreign is not None))
    on["ts_ns"], on["alive"], on["memory_used_bytes"] = START_NS, 1, 1 << 30
    on["gpu"][:N_RANKS], on["pid"][:N_RANKS] = range(N_RANKS), [pids[rank] for rank in range(N_RANKS)]
    if foreign is not None:
        on["gpu"][-1], on["pid"][-1], on["comm"][-1] = foreign, 999_999, b"python3"
    return replace(trace, gpus=rows, gpu_processes=on)


def cause_of(trace: Trace) -> tuple[str, CauseEvidence]:
    (verdict,) = report_of(trace).verdicts
    assert verdict.kind == "device" and verdict.ranks == [2]
    return verdict.causes[0].cause.name, verdict.causes[0].evidence


def test_a_clock_held_by_heat_explains_a_slow_gpu():
    name, evidence = cause_of(with_gpus(slow_trace(), sm_mhz=1200, clock_reasons=0x40))
    assert name == "gpu_slow"
    assert evidence.clock_held_by == ["hardware thermal slowdown"]
    assert (evidence.clock_mhz, evidence.typical_mhz) == (1200, 1980)


@pytest.mark.parametrize("expected", [{"xid": 79}, {"xid": 48}])
def test_an_error_of_the_hardware_is_a_fault(expected):
    name, evidence = cause_of(with_gpus(slow_trace(), **expected))
    assert name == "gpu_fault" and evidence.xid == list(expected.values())


def test_another_process_on_the_gpu_shares_it():
    name, evidence = cause_of(with_gpus(slow_trace(), foreign=2))
    assert name == "gpu_shared" and evidence.also_on_this_gpu == ["python3 (999999)"]


def test_the_multi_process_service_is_not_a_neighbour():
    trace = with_gpus(slow_trace(), foreign=2)
    service = trace.gpu_processes.copy()
    service["comm"][service["comm"] == b"python3"] = b"nvidia-cuda-mps"  # its name, cut to 15 characters
    name, evidence = cause_of(replace(trace, gpu_processes=service))
    assert name == "gpu_slow" and evidence.also_on_this_gpu is None


@pytest.mark.parametrize(
    "expected", [{"sm_mhz": 1890, "clock_reasons": 0x20}, {"sm_mhz": 1200, "clock_reasons": 0x1}, {"xid": 31}]
)
def test_small_dips_idle_clocks_and_program_errors_are_not_evidence(expected):
    name, evidence = cause_of(with_gpus(slow_trace(), **expected))
    assert name == "gpu_slow" and evidence.clock_held_by is None and evidence.xid is None


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        ({"sm_mhz": 1200}, ["SM clock 1200 MHz, other GPUs 1980"]),
        ({"memory_mhz": 810}, []),  # unknown for the others
        ({"n_nvlinks_up": 8}, ["NVLinks up 8, other GPUs 12"]),
        ({"utilization_percent": 40}, ["utilisation 40 %, other GPUs 99"]),
        ({"sm_mhz": 1960}, []),
    ],
)
def test_a_verdict_on_a_gpu_states_how_its_readings_differ(reading: dict[str, int], expected: list[str]):
    _, evidence = cause_of(with_gpus(slow_trace(), **reading))
    assert (evidence.unlike_other_gpus or []) == expected


@pytest.mark.parametrize(
    ("reasons", "limit"),
    [(0x0, "clock not limited"), (0x1 | 0x4, "clock limited at times by software power cap")],
)
def test_a_verdict_on_a_gpu_has_its_readings_where_none_differs(reasons: int, limit: str):
    _, evidence = cause_of(with_gpus(slow_trace(), clock_reasons=reasons))
    assert evidence.unlike_other_gpus is None
    expected = ["SM clock 1980 MHz", "utilisation 99 %", "PCIe generation 1", "NVLinks up 12", limit]
    assert evidence.gpu_readings == expected


def test_the_text_of_a_verdict_has_the_readings_in_a_row_of_their_own():
    report = report_of(with_gpus(slow_trace()))
    (line,) = [line for line in text.report(report).splitlines() if "SM clock 1980 MHz" in line]
    assert line.split()[0] == "readings" and line.endswith("clock not limited (by the driver)")


def counted(sm_percent: list[int], nvlink_mb: list[int]) -> np.ndarray:
    """Hardware counters of GPUs 0, 1, ..."""
    rows = layout.empty(layout.GPU_COUNTERS, len(sm_percent))
    rows["ts_ns"], rows["interval_ns"] = START_NS + 200 * MS, 200 * MS
    rows["gpu"], rows["sm_percent"] = range(len(sm_percent)), sm_percent
    rows["nvlink_sent_bytes_per_s"] = np.array(nvlink_mb) * 1_000_000
    return rows


def test_a_verdict_on_a_gpu_states_how_its_counters_differ():
    trace = replace(with_gpus(slow_trace()), gpu_counters=counted([80, 82, 35, 79], [9000, 9000, 8900, 9000]))
    _, evidence = cause_of(trace)
    assert evidence.unlike_other_gpus == ["multiprocessors at work 35 %, other GPUs 80"]
    slow_link = replace(trace, gpu_counters=counted([80, 82, 79, 79], [9000, 9000, 900, 9000]))
    _, evidence = cause_of(slow_link)
    assert evidence.unlike_other_gpus == ["sent over NVLink 900 MB/s, other GPUs 9000"]


def test_gpus_of_other_nodes_are_compared_at_the_same_time_whatever_their_clocks():
    day_ns, boot_ns, ahead_ns = 86_400 * 10**9, 10**18, 10**15
    rows = layout.empty(layout.GPUS, 4)  # an hour ago both clocks were low
    rows["node"], rows["sm_mhz"], rows["sm_max_mhz"] = [0, 0, 1, 1], [1200, 1200, 1200, 1980], 1980
    rows["ts_ns"] = [day_ns - 3600 * 10**9, day_ns, day_ns + ahead_ns - 3600 * 10**9, day_ns + ahead_ns]
    trace = Trace(gpus=rows, nodes=("a", "b"), clocks=(Clock(0, 0, boot_ns), Clock(1, ahead_ns, boot_ns)))
    since_ns = boot_ns + day_ns
    verdict = Verdict("device", "", [0], since_ns=since_ns, until_ns=since_ns + 10**9)
    evidence = gpu_readings(trace, {0: (0, 0), 1: (1, 0)}, 0, verdict)
    assert evidence.unlike_other_gpus == ["SM clock 1200 MHz, other GPUs 1980"]


def test_new_errors_of_a_gpu_are_evidence():
    trace = with_gpus(slow_trace(), n_nvlink_errors=3)
    trace.gpus["n_nvlink_errors"][[0, 1, 3]] = 0
    later = trace.gpus.copy()
    later["ts_ns"] += 30 * MS
    later["n_nvlink_errors"] = np.where(later["n_nvlink_errors"] == 3, 45, later["n_nvlink_errors"])
    _, evidence = cause_of(replace(trace, gpus=np.concatenate([trace.gpus, later])))
    assert evidence.unlike_other_gpus == ["NVLink errors +42, other GPUs +0"]


def test_new_errors_of_a_gpu_without_counters_of_its_peers_are_no_difference():
    trace = with_gpus(slow_trace(), n_nvlink_errors=3)
    later = trace.gpus.copy()
    later["ts_ns"] += 30 * MS
    later["n_nvlink_errors"][2] = 45
    _, evidence = cause_of(replace(trace, gpus=np.concatenate([trace.gpus, later])))
    assert evidence.unlike_other_gpus is None
    assert evidence.gpu_readings is not None and "NVLink errors +42" in evidence.gpu_readings


def test_a_process_on_another_gpu_is_not_evidence():
    name, evidence = cause_of(with_gpus(slow_trace(), foreign=1))
    assert name == "gpu_slow" and evidence.also_on_this_gpu is None


def test_a_healthy_job_stays_healthy_whatever_its_gpus_say():
    healthy = trace_of(Job(RUNS_AHEAD, n_steps=60, has_gpu_times=True))
    assert report_of(with_gpus(healthy, sm_mhz=1200, clock_reasons=0x40)).healthy


def test_a_late_host_is_not_laid_to_its_gpu():
    late = trace_of(Job(data_parallel(), delays=tuple(every(2, 4, 50 * MS))))
    (verdict,) = report_of(with_gpus(late, sm_mhz=1200, clock_reasons=0x40)).verdicts
    assert verdict.causes[0].cause.name == "host_sleep"


def test_a_hang_by_crossed_call_order_is_not_attributed_to_the_gpu():
    """Such a hang has no cause other than the order."""
    hang = Verdict(
        kind="hang", summary="", ranks=[2], nodes=[""], evidence=VerdictEvidence(crossed_order=True)
    )
    report = Report(source="", examined={}, verdicts=[hang])
    assert with_gpu_states(with_gpus(slow_trace(), xid=79), report) == report


@pytest.mark.parametrize(
    ("message", "name"), [({"sm_mhz": 1200, "clock_reasons": 0x40}, "clock_held_by"), ({"xid": 79}, "xid")]
)
@pytest.mark.parametrize("retention", [Retention(), Retention(min_rows=200, n_steps=16)])
def test_a_stream_adds_driver_evidence_to_a_slow_gpu(message, name, retention):
    heard = told(with_gpus(slow_trace(), **message), Cut(n=12), retention=retention)
    (opened,) = heard.of("opened")
    assert (opened.verdict.kind, opened.verdict.ranks) == ("device", [2])
    assert getattr(opened.verdict.causes[0].evidence, name)
    (reported,) = heard.report.verdicts
    assert getattr(reported.causes[0].evidence, name)


def test_gpu_states_apply_to_later_batches_of_a_stream():
    stream, changes = Stream(clock=lambda: 0), []
    for number, (_, batch) in enumerate(batches(with_gpus(slow_trace(), foreign=2), Cut(n=12))):
        if number:
            batch = replace(batch, gpus=batch.gpus[:0], gpu_processes=batch.gpu_processes[:0])
        changes += stream.feed(batch)
    changes += stream.finish()
    (opened,) = (change.verdict for change in changes if change.kind == "opened")
    assert opened.causes[0].cause.name == "gpu_shared"


def test_the_newest_rows_of_each_gpu_are_kept_within_the_limit():
    rows = layout.empty(layout.GPUS, 20)
    rows["ts_ns"], rows["gpu"] = range(20), np.where(np.arange(20) == 3, 1, 0)
    drivers = Drivers(max_rows=8)
    drivers.add(Trace(gpus=rows))
    assert drivers.tables["gpus"]["ts_ns"].tolist() == [3, 15, 16, 17, 18, 19]


def driver_only(n_held: int, *, n_nodes: int = 2, n_ranks: int = 8) -> Trace:
    """A healthy job without GPU times; the clocks of the last n_held GPUs are held down by a power cap."""
    node = tuple(rank * n_nodes // n_ranks for rank in range(n_ranks))
    made = trace_of(Job(data_parallel(n_ranks), n_ranks, 60, node=node, offset_ns=(0,) * n_nodes))
    rows = layout.empty(layout.GPUS, n_ranks)
    rows["ts_ns"], rows["node"] = START_NS, node
    rows["gpu"] = [rank % (n_ranks // n_nodes) for rank in range(n_ranks)]
    rows["sm_mhz"], rows["sm_max_mhz"], rows["utilization_percent"], rows["clock_reasons"] = 1980, 1980, 99, 0
    rows["sm_mhz"][n_ranks - n_held :], rows["clock_reasons"][n_ranks - n_held :] = 1200, 0x4
    processes = made.processes.copy()
    processes["device"] = rows["gpu"]
    return replace(made, gpus=rows, processes=processes)


@pytest.mark.parametrize("n_held", [1, 4])
def test_gpus_limited_by_a_power_cap_are_named_without_gpu_times(n_held):
    """Also the GPUs of a whole node: they are compared with the other node's."""
    (verdict,) = report_of(driver_only(n_held)).verdicts
    assert (verdict.kind, verdict.ranks) == ("device", list(range(8 - n_held, 8)))
    assert "held down by software power cap" in verdict.summary
    lost = 1 - 1200 / 1980
    seconds = report_of(driver_only(n_held)).examined["seconds"]
    assert verdict.cost.gpu_seconds == 0
    assert verdict.cost.at_most_gpu_seconds == pytest.approx(lost * seconds * (8 - n_held), rel=0.01)


def test_clocks_that_most_gpus_have_accuse_none():
    assert report_of(driver_only(8)).healthy
    assert report_of(driver_only(5)).healthy


def test_a_gpu_with_few_pcie_lanes_is_remarked_with_its_rank():
    made = driver_only(0)
    made.gpus["pcie_width"], made.gpus["pcie_max_width"] = 16, 16
    made.gpus["pcie_width"][5] = 4
    report = report_of(made)
    assert report.healthy
    (remark,) = (each for each in report.benign if "PCIe" in str(each["what"]))
    assert remark["rank"] == 5 and "4 of its 16" in str(remark["what"])


def slower_trace(n_lowered: int, *, reasons: int = 0x4) -> Trace:
    """All GPUs are slower from step 40 on, and the drivers lower the clocks of some."""
    late = {(rank, step): 2 * MS for rank in range(N_RANKS) for step in range(40, 80)}
    made = trace_of(Job(data_parallel(work_ns=500_000, gpu_ns=3 * MS), n_steps=80, gpu_late_ns=late))
    before = with_gpus(made)
    at_ns = int(np.quantile(made.collectives["ts_ns"], 0.6))
    after = before.gpus.copy()
    after["ts_ns"] = at_ns
    after["sm_mhz"][:n_lowered], after["clock_reasons"][:n_lowered] = 1605, reasons
    idle = before.gpus.copy()
    idle["ts_ns"] = made.collectives["ts_ns"].max() + 1000 * MS
    return replace(before, gpus=np.concatenate([before.gpus, after, idle]))


def test_a_slower_job_states_that_the_clocks_of_its_gpus_were_lowered():
    (verdict,) = report_of(slower_trace(N_RANKS)).verdicts
    assert (verdict.kind, verdict.ranks) == ("change", [])
    assert verdict.evidence.lowered_clocks == [
        f"rank {rank}: 1605 MHz instead of 1980, software power cap" for rank in range(N_RANKS)
    ]
    assert "lowered the clocks of 4 of 4 GPUs" in verdict.summary
    assert "nvidia-smi -q -d PERFORMANCE" in verdict.advice[0]


@pytest.mark.parametrize(("n_lowered", "reasons"), [(2, 0x4), (4, 0x1), (0, 0)])
def test_a_slower_job_has_no_lowered_clocks_if_most_gpus_run_as_before(n_lowered: int, reasons: int):
    (verdict,) = report_of(slower_trace(n_lowered, reasons=reasons)).verdicts
    assert verdict.kind == "change" and verdict.evidence.lowered_clocks is None
