"""Values from /proc and NVML become metrics; missing values are omitted."""

from pathlib import Path

import pytest

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.exporters.machine_metrics import boot_wall_ns, read_machine, set_gpu_metrics
from stallscope.exporters.metric_values import Meter

FILES = {
    "stat": "cpu  1000 0 200 3000 40 5 6 7 0 0\ncpu0 1 0 0 0\nbtime 1700000000\n",
    "meminfo": "MemTotal:  1000 kB\nMemFree:  300 kB\nMemAvailable: 700 kB\nBuffers: 50 kB\nCached: 250 kB\n",
    "diskstats": "259 0 nvme0n1 5 0 80 1 6 0 160 2 0 0 0\n259 1 nvme0n1p1 5 0 80 1 6 0 160 2 0 0 0\n"
    "7 0 loop0 1 0 8 0 0 0 0 0 0 0 0\n",
    "net/dev": "Inter-|   Receive\n face |bytes\n  eth0: 111 1 0 0 0 0 0 0 222 2 0 0 0 0 0 0\n",
}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def numbers(meter: Meter) -> dict[str, dict]:
    return {m.name: {entry.values: entry.number for entry in series} for m, series in meter.read()}


def test_the_machine_is_read(proc: Path):
    meter = Meter(0)
    read_machine(meter, proc)
    result = numbers(meter)
    assert result["system.cpu.time"][("user",)] == 10.0
    assert result["system.cpu.time"][("interrupt",)] == pytest.approx(0.11)
    assert result["system.memory.usage"] == {
        (state,): kib * 1024
        for state, kib in {"free": 300, "buffers": 50, "cached": 250, "used": 400}.items()
    }
    assert result["system.disk.io"] == {("nvme0n1", "read"): 80 * 512, ("nvme0n1", "write"): 160 * 512}
    assert result["system.network.io"] == {("eth0", "receive"): 111, ("eth0", "transmit"): 222}
    assert boot_wall_ns(proc) == 1_700_000_000 * 10**9


def test_a_file_that_is_missing_leaves_only_its_own_metrics_out(proc: Path):
    (proc / "meminfo").unlink()
    meter = Meter(0)
    read_machine(meter, proc)
    assert "system.memory.usage" not in numbers(meter)
    assert "system.network.io" in numbers(meter)


def test_gpu_metrics_use_the_units_of_the_semantic_conventions():
    """Two GPUs; the second, like a partition, reports neither power nor utilisation."""
    rows = layout.empty(layout.GPUS, 2)
    rows["uuid"], rows["name"] = [b"GPU-0", b"GPU-1"], b"H100"
    rows["utilization_percent"], rows["power_mw"] = [75, UNKNOWN], [250_500, UNKNOWN]
    rows["memory_used_bytes"], rows["sm_mhz"], rows["clock_reasons"] = [10, 11], 1980, 0x41
    rows["n_ecc_uncorrected"] = [2, 0]
    meter = Meter(0)
    set_gpu_metrics(meter, rows)
    result = numbers(meter)
    first, second = ("GPU-0", "H100", "NVIDIA"), ("GPU-1", "H100", "NVIDIA")
    assert result["hw.gpu.utilization"] == {first: 0.75}
    assert result["hw.gpu.memory.usage"] == {first: 10, second: 11}
    assert result["hw.power"] == {(*first, "gpu"): 250.5}
    assert result["gpu.clock.frequency"] == {first: 1.98e9, second: 1.98e9}
    assert result["hw.errors"] == {(*first, "uncorrected_ecc"): 2, (*second, "uncorrected_ecc"): 0}
    throttled = {values[3]: number for values, number in result["gpu.clock.throttled"].items()}
    assert {name for name, number in throttled.items() if number} == {"hardware_thermal"}
