"""GPUs as the real bindings report them, from a library that is compiled for the test."""

from pathlib import Path

import pytest

from stallscope.capture.gpu.gpu_counters import GpuCounters
from stallscope.capture.gpu.gpu_edges import GpuEdges
from stallscope.capture.gpu.gpu_state import GpuStates
from stallscope.capture.gpu.gpu_watch import Gpus
from stallscope.capture.gpu.nvml import devices, library
from stallscope.errors import CannotTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import LOWERED_POWER_LIMIT

from ..patience import until

SECOND = 10**9
H100 = {
    "uuid": "GPU-11111111-2222-3333-4444-555555555555",
    "name": "NVIDIA H100 80GB HBM3",
    "utilization_percent": 97,
    "memory_used_bytes": 70 << 30,
    "memory_total_bytes": 80 << 30,
    "sm_mhz": 1980,
    "sm_max_mhz": 1980,
    "memory_mhz": 2619,
    "clock_reasons": 0,
    "power_mw": 650_000,
    "power_limit_mw": 700_000,
    "temperature_celsius": 61,
    "n_ecc_corrected": 2,
    "n_ecc_uncorrected": 0,
    "pcie_generation": 5,
    "pcie_width": 16,
    "pcie_max_generation": 5,
    "pcie_max_width": 16,
    "n_nvlinks": 18,
    "n_nvlinks_up": 12,
    "n_nvlink_errors": 3,
    "process": [f"4711 {60 << 30}", f"4712 {1 << 30}"],
}
OTHER = H100 | {"uuid": "GPU-99999999-2222-3333-4444-555555555555", "process": []}


def test_a_gpu_row_has_every_value_that_the_driver_reports(fake_gpus):
    fake_gpus.have(H100)
    with library() as nvml:
        look = GpuStates(nvml, node=3).read(5 * SECOND)
    (row,) = look.gpus
    assert (row["ts_ns"], row["node"], row["gpu"], row["mig"]) == (5 * SECOND, 3, 0, UNKNOWN)
    assert row["uuid"].decode() == H100["uuid"] and row["name"].decode() == H100["name"]
    for name in set(H100) - {"uuid", "name", "process", "n_nvlinks"}:
        assert row[name] == H100[name], name
    assert row["n_processes"] == 2 and row["xid"] == UNKNOWN
    assert {(p["pid"], p["memory_used_bytes"]) for p in look.processes} == {(4711, 60 << 30), (4712, 1 << 30)}


def test_the_use_of_a_gpu_by_each_process_counts_from_the_second_reading_on(fake_gpus):
    """The first samples are of the time before the capture."""
    fake_gpus.have(H100 | {"use": ["4711 55", "4712 30", "4713 0"]})
    with library() as nvml:
        states = GpuStates(nvml, node=3)
        assert len(states.read(0).use) == 0
        rows = states.read(SECOND).use
    assert [(int(row["gpu"]), int(row["pid"]), int(row["sm_percent"])) for row in rows] == [
        (0, 4711, 55),
        (0, 4712, 30),
    ]


def test_nvlink_errors_of_each_link_are_summed_where_the_driver_has_no_total(fake_gpus):
    """Hopper: replays (161) and recoveries (162) of 18 links."""
    errors = {f"nvlink_{number}_{link}": link for number in (161, 162) for link in range(18)}
    fake_gpus.have({name: value for name, value in H100.items() if name != "n_nvlink_errors"} | errors)
    with library() as nvml:
        (row,) = GpuStates(nvml, node=0).read(0).gpus
    assert row["n_nvlink_errors"] == 2 * sum(range(18))


def test_a_link_that_does_not_answer_for_a_while_is_no_new_error(fake_gpus):
    errors = {f"nvlink_161_{link}": 5 for link in range(18)}
    whole = {name: value for name, value in H100.items() if name != "n_nvlink_errors"} | errors
    without_link = {name: value for name, value in whole.items() if name != "nvlink_161_3"}
    seen = []
    fake_gpus.have(whole)
    with library() as nvml:
        states = GpuStates(nvml, node=0)
        for state in (whole, without_link, whole):
            fake_gpus.have(state)
            for _ in range(10):  # the errors are queried in every tenth reading
                (row,) = states.read(SECOND).gpus
            seen.append(row["n_nvlink_errors"])
    assert seen == [18 * 5, UNKNOWN, 18 * 5]


def test_the_utilization_is_the_mean_of_the_samples_since_the_last_reading(fake_gpus):
    fake_gpus.have(H100 | {"busy": ["1000000 10"]})
    with library() as nvml:
        states = GpuStates(nvml, node=0)
        assert states.read(SECOND).gpus["utilization_percent"].tolist() == [97]
        fake_gpus.have(H100 | {"busy": ["1000000 10", "1200000 80", "1400000 90", "1600000 100"]})
        assert states.read(2 * SECOND).gpus["utilization_percent"].tolist() == [90]
        assert states.read(3 * SECOND).gpus["utilization_percent"].tolist() == [97]


@pytest.mark.parametrize(("default_mw", "is_lowered"), [(700_000, False), (900_000, True)])
def test_a_lowered_power_limit_is_a_reason_for_the_clock(fake_gpus, default_mw, is_lowered):
    fake_gpus.have(H100 | {"clock_reasons": 4, "power_default_mw": default_mw})
    with library() as nvml:
        (row,) = GpuStates(nvml, node=0).read(0).gpus
    assert row["clock_reasons"] == 4 | (LOWERED_POWER_LIMIT if is_lowered else 0)


def test_counters_are_means_since_the_last_reading_of_gpus_that_have_them(fake_gpus):
    counting = H100 | {"counter": ["2 41.6", "5 12.2", "10 nan", "60 1.5", "61 2"]}
    fake_gpus.have(counting, OTHER)
    with library() as nvml:
        counters = GpuCounters(nvml, 3, dict(devices(nvml)))
        assert not len(counters.read(5 * SECOND))
        (row,) = counters.read(7 * SECOND)
        assert (row["ts_ns"], row["interval_ns"], row["node"], row["gpu"]) == (7 * SECOND, 2 * SECOND, 3, 0)
        assert (row["sm_percent"], row["tensor_percent"], row["memory_percent"]) == (42, 12, UNKNOWN)
        assert (row["nvlink_received_bytes_per_s"], row["nvlink_sent_bytes_per_s"]) == (3 << 19, 2 << 20)
        assert row["pcie_sent_bytes_per_s"] == UNKNOWN
        fake_gpus.have(counting | {"lost": 1}, OTHER)
        assert not len(counters.read(8 * SECOND))
        fake_gpus.have(counting, OTHER)
        assert not len(counters.read(9 * SECOND))
        assert len(counters.read(10 * SECOND)) == 1
        counters.close()
        assert nvml.nvmlLib.n_open_samples() == 0


def test_values_that_a_gpu_does_not_report_are_unknown(fake_gpus):
    fake_gpus.have({"uuid": "GPU-old", "name": "Tesla", "no_processes": 1, "power_mw": 1000})
    with library() as nvml:
        look = GpuStates(nvml, node=0).read(0)
    (row,) = look.gpus
    assert row["power_mw"] == 1000
    for entry in layout.GPUS.fields:
        if entry.may_be_unknown and entry.name != "power_mw":
            assert row[entry.name] == UNKNOWN, entry.name
    assert len(look.processes) == 0


def test_partitions_are_listed_next_to_their_gpu(fake_gpus):
    whole = H100 | {"mig": 1, "process": []}
    part = {
        "which": "0.1",
        "uuid": "MIG-a",
        "memory_used_bytes": 5,
        "memory_total_bytes": 10,
        "process": ["77 5"],
    }
    fake_gpus.have(whole, part)
    with library() as nvml:
        look = GpuStates(nvml, node=0).read(0)
    assert look.gpus[["gpu", "mig", "uuid"]].tolist() == [
        (0, UNKNOWN, str(H100["uuid"]).encode()),
        (0, 1, b"MIG-a"),
    ]
    assert look.gpus["memory_used_bytes"].tolist() == [H100["memory_used_bytes"], 5]
    assert look.gpus["sm_mhz"].tolist() == [1980, UNKNOWN]
    assert look.processes[["gpu", "mig", "pid"]].tolist() == [(0, 1, 77)]


def test_gpus_are_known_by_their_files_and_uuids(fake_gpus):
    part = {"which": "1.0", "uuid": "MIG-a"}
    fake_gpus.have(H100 | {"minor": 4}, OTHER | {"minor": 1, "mig": 1}, part)
    with library() as nvml:
        gpu_numbers = GpuStates(nvml, node=0).gpu_numbers()
    assert gpu_numbers.by_file == {4: 0, 1: 1}
    assert gpu_numbers.by_uuid == {str(H100["uuid"]): 0, str(OTHER["uuid"]): 1, "MIG-a": 1}


def test_a_gpu_that_fell_off_the_bus_has_unknown_values(fake_gpus):
    fake_gpus.have(H100, OTHER)
    with library() as nvml:
        states = GpuStates(nvml, node=0)
        states.read(0)
        fake_gpus.have(H100, OTHER | {"lost": 1})
        for _ in range(5):
            look = states.read(SECOND)
    assert look.gpus["sm_mhz"].tolist() == [1980, UNKNOWN]
    assert look.gpus["n_ecc_corrected"].tolist()[0] == 2


def test_noise_makes_no_row_and_edges_do():
    rows = layout.empty(layout.GPUS, 1)
    rows["sm_mhz"], rows["clock_reasons"], rows["temperature_celsius"] = 1980, 0, 60
    edges, kept = GpuEdges(), []

    def look(second: int, **values: int) -> None:
        rows["ts_ns"] = second * SECOND
        for name, value in values.items():
            rows[name] = value
        kept.extend(edges.changed_gpus(rows.copy())["ts_ns"].tolist())

    look(0)
    look(2, sm_mhz=1965, temperature_celsius=62)
    look(4, clock_reasons=0x40)
    look(6, sm_mhz=1200)
    look(8, sm_mhz=1185)
    look(10, sm_mhz=UNKNOWN)
    look(12, xid=79)
    look(14, xid=UNKNOWN)
    look(42)
    assert kept == [second * SECOND for second in (0, 4, 6, 10, 12, 42)]


def test_a_gpu_process_is_recorded_at_its_start_and_end():
    edges = GpuEdges()

    def look(second: int, *processes: tuple[int, int]) -> list[tuple[int, int, int]]:
        rows = layout.empty(layout.GPU_PROCESSES, len(processes))
        rows["ts_ns"], rows["alive"] = second * SECOND, 1
        for row, (pid, used) in zip(rows, processes, strict=True):
            row["pid"], row["memory_used_bytes"] = pid, used
        result = edges.changed_processes(rows, second * SECOND)
        return [(int(row["ts_ns"]) // SECOND, int(row["pid"]), int(row["alive"])) for row in result]

    assert look(0, (7, 1 << 30)) == [(0, 7, 1)]
    assert look(4, (7, (1 << 30) + 5), (8, 5)) == [(4, 8, 1)]
    assert look(8, (7, 4 << 30), (8, 5)) == [(8, 7, 1)]
    assert look(12) in ([(12, 7, 0), (12, 8, 0)], [(12, 8, 0), (12, 7, 0)])
    assert look(16) == []


def test_gpus_are_watched_in_the_background_with_their_errors(fake_gpus):
    fake_gpus.have(H100, OTHER)
    gpus = Gpus(node=1, every_s=0.02)
    try:
        assert len(gpus) == 2
        until(lambda: len(gpus.latest()) == 2)
        first = {table.name: rows for table, rows in gpus.take_rows()}
        assert first["gpus"]["gpu"].tolist() == [0, 1]
        assert sorted(first["gpu_processes"]["pid"].tolist()) == [4711, 4712]
        fake_gpus.have(H100, OTHER | {"sm_mhz": 1200, "clock_reasons": 0x40, "xid": [48, 79]})
        observed: list[tuple[int, int, int]] = []

        def has_told() -> bool:
            rows = dict(gpus.take_rows()).get(layout.GPUS, ())
            observed.extend((int(r["gpu"]), int(r["sm_mhz"]), int(r["xid"])) for r in rows)
            return (1, 1200, 79) in observed

        until(has_told)
        assert {(1, 1200, 48), (1, 1200, 79)} <= set(observed)
        assert all(gpu == 1 for gpu, _, _ in observed)
        assert gpus.latest()["xid"].tolist() == [UNKNOWN, UNKNOWN]
    finally:
        gpus.close()
    assert not gpus._thread.is_alive()


def test_a_driver_that_is_not_loaded_is_reported(fake_gpus):
    fake_gpus.have(driver="driver missing 1")
    with pytest.raises(CannotTrace, match="not loaded: modprobe nvidia"):
        Gpus(node=0)


def test_a_missing_driver_is_reported():
    if Path("/dev/nvidia0").exists():
        pytest.skip("gpu: this machine has a driver")
    with pytest.raises(CannotTrace, match="no NVIDIA driver"), library():
        pass
