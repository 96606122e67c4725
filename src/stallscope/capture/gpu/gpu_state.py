"""The state of each GPU and each partition (MIG) at a moment, as rows of GPUS and GPU_PROCESSES.

Clocks, power, temperature and links belong to the whole GPU; memory and processes of a partitioned GPU belong to its
partitions. Values that change seldom or are expensive to query (links, error counters, processes) are queried less
often.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.capture.gpu.nvml import devices, query, text
from stallscope.capture.process.visible_devices import GpuNumbers
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import LOWERED_POWER_LIMIT

_PROCESSES_EVERY = 2
_INFREQUENT_EVERY = 10
"""Processes, links and error counters are queried in every n-th reading."""

_MAX_NVLINKS = 36
_LOWERED = 0.97
"""A power limit below this share of the default has been lowered."""

_NVLINK_ERRORS = (
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)
"""Fields of nvmlDeviceGetFieldValues (nvml.h) for all links of a GPU, before Hopper."""

_NVLINK_ERRORS_OF_LINK = (
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",
    "NVML_FI_DEV_NVLINK_ERROR_DL_CRC",
    "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
)
"""Fields for one link, with its number as scope: the first three of Hopper, the others of Blackwell and later."""


@dataclass(frozen=True)
class GpuReading:
    """One reading of all GPUs. gpus: rows of GPUS, one for each. processes: rows of GPU_PROCESSES; None if not queried.

    use: rows of GPU_USE; empty where the driver does not count by process.
    """

    gpus: Array
    processes: Array | None
    use: Array = field(default_factory=lambda: layout.empty(layout.GPU_USE))


@dataclass
class _Device:
    """A GPU, or a partition if `mig` is known. infrequent: last values of the fields that are queried less often."""

    gpu: int
    mig: int
    handle: Any
    uuid: bytes
    name: bytes
    infrequent: dict[str, int] = field(default_factory=dict)
    is_power_limited: bool = False
    nvlink_fields: frozenset[tuple[int, int]] | None = None  # error counters that the driver had at first


class GpuStates:
    """Queries the GPUs that are present at construction; partitions are listed again from time to time."""

    def __init__(self, nvml: Any, node: int, *, proc: Path = Path("/proc")):
        self._nvml, self._node, self._proc = nvml, node, proc
        self._gpus = [_device(nvml, number, handle) for number, handle in devices(nvml)]
        self._partitions: list[_Device] = []
        self._n_readings = 0
        self._n_processes: dict[tuple[int, int], int] = {}
        self._use_until_us: dict[int, int] = {}
        self._busy_until_us: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._gpus)

    def numbers(self) -> dict[bytes, int]:
        """GPU number by UUID."""
        return {device.uuid: device.gpu for device in self._gpus}

    def gpu_numbers(self) -> GpuNumbers:
        """The identifiers that processes use for GPUs: device files and UUIDs."""
        minors = {
            device.gpu: query(self._nvml, self._nvml.nvmlDeviceGetMinorNumber, device.handle)
            for device in self._gpus
        }
        partitions = [partition for device in self._gpus for partition in self._partitions_of(device)]
        return GpuNumbers(
            by_file={int(minor): gpu for gpu, minor in minors.items() if minor is not None},
            by_uuid={device.uuid.decode(): device.gpu for device in (*self._gpus, *partitions)},
        )

    def read(self, now_ns: int) -> GpuReading:
        """Query all GPUs. The row of a GPU that has fallen off the bus is all unknown."""
        if self._n_readings % _INFREQUENT_EVERY == 0:
            self._read_infrequent()
        processes = self._read_processes(now_ns) if self._n_readings % _PROCESSES_EVERY == 0 else None
        self._n_readings += 1
        all_devices = [*self._gpus, *self._partitions]
        rows = layout.empty(layout.GPUS, len(all_devices))
        rows["ts_ns"], rows["node"] = now_ns, self._node
        for row, device in zip(rows, all_devices, strict=True):
            row["gpu"], row["mig"], row["uuid"], row["name"] = (
                device.gpu,
                device.mig,
                device.uuid,
                device.name,
            )
            for name, value in (device.infrequent | dict(self._frequent_values(device))).items():
                row[name] = value
            row["n_processes"] = self._n_processes.get((device.gpu, device.mig), UNKNOWN)
        return GpuReading(rows, processes, self._mean_use(now_ns))

    def _mean_use(self, now_ns: int) -> Array:
        """The mean share of each process since the last reading, by the driver's own samples."""
        nvml, uses = self._nvml, []
        for device in self._gpus:
            since_us = self._use_until_us.get(device.gpu, 0)
            samples = query(nvml, nvml.nvmlDeviceGetProcessUtilization, device.handle, since_us) or []
            new_samples = [sample for sample in samples if sample.timeStamp > since_us]
            if not new_samples:
                continue
            self._use_until_us[device.gpu] = max(int(sample.timeStamp) for sample in new_samples)
            shares: dict[int, list[int]] = {}
            for sample in new_samples if since_us else ():
                shares.setdefault(int(sample.pid), []).append(int(sample.smUtil))
            uses += [
                (device.gpu, pid, round(sum(percents) / len(percents))) for pid, percents in shares.items()
            ]
        rows = layout.empty(layout.GPU_USE, len(uses))
        rows["ts_ns"], rows["node"] = now_ns, self._node
        for row, (gpu, pid, percent) in zip(rows, uses, strict=True):
            row["gpu"], row["pid"], row["sm_percent"] = gpu, pid, percent
        return rows[(rows["sm_percent"] > 0) & (rows["pid"] > 0)]

    def _read_infrequent(self) -> None:
        self._partitions = [partition for device in self._gpus for partition in self._partitions_of(device)]
        for device in self._gpus:
            device.infrequent = dict(self._infrequent_values(device))
            default_mw = query(self._nvml, self._nvml.nvmlDeviceGetPowerManagementDefaultLimit, device.handle)
            limit_mw = device.infrequent.get("power_limit_mw", UNKNOWN)
            device.is_power_limited = limit_mw > 0 and bool(default_mw) and limit_mw < _LOWERED * default_mw

    def _partitions_of(self, gpu: _Device) -> Iterator[_Device]:
        nvml = self._nvml
        mode = query(nvml, nvml.nvmlDeviceGetMigMode, gpu.handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(query(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, gpu.handle) or 0):
            handle = query(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.handle, number)
            if handle is not None:
                yield _device(nvml, gpu.gpu, handle, mig=number)

    def _frequent_values(self, device: _Device) -> Iterator[tuple[str, int]]:
        nvml, handle = self._nvml, device.handle
        if memory := query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle):
            yield "memory_used_bytes", int(memory.used)
            yield "memory_total_bytes", int(memory.total)
        if device.mig != UNKNOWN:
            return
        if (percent := self._utilization(device)) is not None:
            yield "utilization_percent", percent
        for name, call, arguments in (
            ("sm_mhz", nvml.nvmlDeviceGetClockInfo, (nvml.NVML_CLOCK_SM,)),
            ("memory_mhz", nvml.nvmlDeviceGetClockInfo, (nvml.NVML_CLOCK_MEM,)),
            ("power_mw", nvml.nvmlDeviceGetPowerUsage, ()),
            ("temperature_celsius", nvml.nvmlDeviceGetTemperature, (nvml.NVML_TEMPERATURE_GPU,)),
        ):
            if (value := query(nvml, call, handle, *arguments)) is not None:
                yield name, int(value)
        if (reasons := _reasons(nvml, handle)) is not None:
            yield "clock_reasons", reasons | (LOWERED_POWER_LIMIT if device.is_power_limited else 0)

    def _utilization(self, device: _Device) -> int | None:
        """The mean of the driver's samples since the last reading, several a second; otherwise its present value.

        The present value covers the last sample only, a sixth of a second.
        """
        nvml, since_us = self._nvml, self._busy_until_us.get(device.gpu, 0)
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = query(nvml, nvml.nvmlDeviceGetSamples, device.handle, kind, since_us) or (0, [])
        new_samples = [sample for sample in samples if sample.timeStamp > since_us]
        if new_samples:
            self._busy_until_us[device.gpu] = max(int(sample.timeStamp) for sample in new_samples)
        if new_samples and since_us:
            return round(sum(int(sample.sampleValue.uiVal) for sample in new_samples) / len(new_samples))
        use = query(nvml, nvml.nvmlDeviceGetUtilizationRates, device.handle)
        return int(use.gpu) if use else None

    def _infrequent_values(self, device: _Device) -> Iterator[tuple[str, int]]:
        nvml, handle = self._nvml, device.handle
        volatile = nvml.NVML_VOLATILE_ECC
        corrected, uncorrected = (
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
        for name, call, arguments in (
            ("sm_max_mhz", nvml.nvmlDeviceGetMaxClockInfo, (nvml.NVML_CLOCK_SM,)),
            ("power_limit_mw", nvml.nvmlDeviceGetEnforcedPowerLimit, ()),
            ("n_ecc_corrected", nvml.nvmlDeviceGetTotalEccErrors, (corrected, volatile)),
            ("n_ecc_uncorrected", nvml.nvmlDeviceGetTotalEccErrors, (uncorrected, volatile)),
            ("pcie_generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration, ()),
            ("pcie_width", nvml.nvmlDeviceGetCurrPcieLinkWidth, ()),
            ("pcie_max_generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration, ()),
            ("pcie_max_width", nvml.nvmlDeviceGetMaxPcieLinkWidth, ()),
        ):
            if (value := query(nvml, call, handle, *arguments)) is not None:
                yield name, int(value)
        links = [_link(nvml, handle, number) for number in range(_n_nvlinks(nvml, handle))]
        if any(up is not None for up in links):
            yield "n_nvlinks_up", sum(bool(up) for up in links)
        errors = _nvlink_errors(nvml, handle, len(links))
        device.nvlink_fields = device.nvlink_fields or frozenset(errors) or None
        if device.nvlink_fields and device.nvlink_fields <= errors.keys():
            yield "n_nvlink_errors", sum(errors[each] for each in device.nvlink_fields)

    def _read_processes(self, now_ns: int) -> Array:
        """The processes of all GPUs, by partition on a partitioned GPU. A process that computes and draws is listed
        once.
        """
        nvml = self._nvml
        memory_bytes: dict[tuple[int, int, int], int] = {}
        self._n_processes = {}
        partitioned = {partition.gpu for partition in self._partitions}
        for device in [
            *(device for device in self._gpus if device.gpu not in partitioned),
            *self._partitions,
        ]:
            lists = [
                query(nvml, call, device.handle)
                for call in (
                    nvml.nvmlDeviceGetComputeRunningProcesses,
                    nvml.nvmlDeviceGetGraphicsRunningProcesses,
                )
            ]
            if lists[0] is None:
                continue
            pids = {process.pid: process.usedGpuMemory for processes in lists for process in processes or ()}
            self._n_processes[device.gpu, device.mig] = len(pids)
            memory_bytes |= {
                (device.gpu, device.mig, pid): UNKNOWN if n is None else n for pid, n in pids.items()
            }
        rows = layout.empty(layout.GPU_PROCESSES, len(memory_bytes))
        rows["ts_ns"], rows["node"], rows["alive"] = now_ns, self._node, 1
        if memory_bytes:
            rows["gpu"], rows["mig"], rows["pid"] = np.array(list(memory_bytes)).T
            rows["memory_used_bytes"] = list(memory_bytes.values())
            rows["comm"] = [_comm(self._proc, pid) for _, _, pid in memory_bytes]
        return rows


def _device(nvml: Any, number: int, handle: Any, mig: int = UNKNOWN) -> _Device:
    uuid, name = (
        query(nvml, call, handle) or "" for call in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName)
    )
    return _Device(number, mig, handle, text(uuid).encode()[:48], text(name).encode()[:48])


def _reasons(nvml: Any, handle: Any) -> int | None:
    """Bit mask of the clock event reasons. Drivers and bindings before 535 use an older name of the call."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        if hasattr(nvml, name) and (reasons := query(nvml, getattr(nvml, name), handle)) is not None:
            return int(reasons)
    return None


def _n_nvlinks(nvml: Any, handle: Any) -> int:
    values = query(nvml, nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT])
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return 0
    return min(int(values[0].value.uiVal), _MAX_NVLINKS)


def _link(nvml: Any, handle: Any, number: int) -> bool | None:
    state = query(nvml, nvml.nvmlDeviceGetNvLinkState, handle, number)
    return None if state is None else bool(state)


def _nvlink_errors(nvml: Any, handle: Any, n_links: int) -> dict[tuple[int, int], int]:
    """Errors on the links of a GPU, by field and scope. A link that does not answer at present is absent."""
    known = _known_fields(nvml, handle, [(getattr(nvml, name), 0) for name in _NVLINK_ERRORS])
    if not known and n_links:
        of_first = [(number, 0) for name in _NVLINK_ERRORS_OF_LINK if (number := getattr(nvml, name, 0))]
        counted = [number for number, _ in _known_fields(nvml, handle, of_first)]
        of_all = [(number, link) for number in counted for link in range(n_links)]
        known = _known_fields(nvml, handle, of_all)
    return known


def _known_fields(nvml: Any, handle: Any, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The values of fields that the driver supports. wanted: number and scope of each field."""
    values = query(nvml, nvml.nvmlDeviceGetFieldValues, handle, wanted) if wanted else None
    return {
        each: _number(nvml, value)
        for each, value in zip(wanted, values or (), strict=False)
        if value.nvmlReturn == nvml.NVML_SUCCESS
    }


def _number(nvml: Any, field: Any) -> int:
    is_small = field.valueType == nvml.NVML_VALUE_TYPE_UNSIGNED_INT
    return int(field.value.uiVal if is_small else field.value.ullVal)


def _comm(proc: Path, pid: int) -> bytes:
    try:
        return (proc / str(pid) / "comm").read_bytes().rstrip(b"\n")[:16]
    except OSError:
        return b""
