"""What /proc and NVML tell becomes metrics; what they do not tell is left out."""

import types
from pathlib import Path

import pytest

from stallscope.exporters.machine import boot_wall_ns, gpus, read_gpus, read_machine
from stallscope.exporters.meter import Meter

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
    return {m.name: {one.values: one.number for one in series} for m, series in meter.read()}


def test_the_machine_is_read(proc: Path):
    meter = Meter(0)
    read_machine(meter, proc)
    found = numbers(meter)
    assert found["system.cpu.time"][("user",)] == 10.0
    assert found["system.cpu.time"][("interrupt",)] == pytest.approx(0.11)
    assert found["system.memory.usage"] == {
        (state,): kib * 1024
        for state, kib in {"free": 300, "buffers": 50, "cached": 250, "used": 400}.items()
    }
    assert found["system.disk.io"] == {("nvme0n1", "read"): 80 * 512, ("nvme0n1", "write"): 160 * 512}
    assert found["system.network.io"] == {("eth0", "receive"): 111, ("eth0", "transmit"): 222}
    assert boot_wall_ns(proc) == 1_700_000_000 * 10**9


def test_a_file_that_is_missing_leaves_only_its_own_metrics_out(proc: Path):
    (proc / "meminfo").unlink()
    meter = Meter(0)
    read_machine(meter, proc)
    assert "system.memory.usage" not in numbers(meter)
    assert "system.network.io" in numbers(meter)


class NVMLError(Exception):
    pass


def fake_nvml() -> types.SimpleNamespace:
    """Two GPUs; the second tells neither its power nor its use, as a partition."""

    def use(device: int) -> types.SimpleNamespace:
        if device:
            raise NVMLError
        return types.SimpleNamespace(gpu=75, memory=10)

    def power(device: int) -> int:
        if device:
            raise NVMLError
        return 250_500

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda device: f"GPU-{device}",
        nvmlDeviceGetName=lambda device: b"H100",
        nvmlDeviceGetUtilizationRates=use,
        nvmlDeviceGetMemoryInfo=lambda device: types.SimpleNamespace(used=10 + device, total=80),
        nvmlDeviceGetTemperature=lambda device, sensor: 60,
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetClockInfo=lambda device, clock: 1980,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda device: 0x41,
    )


def test_gpus_are_told_in_the_units_of_the_conventions():
    meter = Meter(0)
    read_gpus(meter, fake_nvml())
    found = numbers(meter)
    first, second = ("GPU-0", "H100", "NVIDIA"), ("GPU-1", "H100", "NVIDIA")
    assert found["hw.gpu.utilization"] == {first: 0.75}
    assert found["hw.gpu.memory.usage"] == {first: 10, second: 11}
    assert found["hw.power"] == {(*first, "gpu"): 250.5}
    assert found["gpu.clock.frequency"] == {first: 1.98e9, second: 1.98e9}
    throttled = {values[3]: number for values, number in found["gpu.clock.throttled"].items()}
    assert {name for name, number in throttled.items() if number} == {"hardware_thermal"}


def test_without_a_driver_there_is_nothing():
    if Path("/dev/nvidia0").exists():
        pytest.skip("gpu: this machine has a driver")
    with gpus() as nvml:
        assert nvml is None
