"""Hardware counters of each GPU (NVML's GPM: Hopper and later), as rows of GPU_COUNTERS.

A GPU is busy for its driver while any kernel runs, however small. The counters show how many of its multiprocessors
work, and how much data its memory and its links transfer. A reading covers the time since the previous reading. It
takes about 1.4 ms per GPU (H200), so the GPUs are read once in EVERY readings of their state. Partitions are not read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stallscope.capture.gpu.nvml import query
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array

EVERY = 5

_METRICS: Mapping[str, tuple[str, float]] = {
    "sm_percent": ("NVML_GPM_METRIC_SM_UTIL", 1.0),
    "tensor_percent": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1.0),
    "memory_percent": ("NVML_GPM_METRIC_DRAM_BW_UTIL", 1.0),
    "pcie_sent_bytes_per_s": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", 2.0**20),
    "pcie_received_bytes_per_s": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", 2.0**20),
    "nvlink_sent_bytes_per_s": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", 2.0**20),
    "nvlink_received_bytes_per_s": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", 2.0**20),
}
"""Column -> metric, and the factor to its unit. Percentages, and MiB per second (nvmlGpmMetricId_t in nvml.h)."""


class GpuCounters:
    """The counters of the GPUs that have them. handles: NVML's, by number of the GPU."""

    def __init__(self, nvml: Any, node: int, handles: Mapping[int, Any]):
        self._nvml, self._node = nvml, node
        self._handles = {gpu: handle for gpu, handle in handles.items() if self._has_counters(handle)}
        self._samples: dict[int, tuple[int, Any]] = {}

    def read(self, now_ns: int) -> Array:
        """A row of GPU_COUNTERS for each GPU: means since the last call; empty at the first call."""
        rows = layout.empty(layout.GPU_COUNTERS, len(self._handles))
        rows["ts_ns"], rows["node"] = now_ns, self._node
        for row, (gpu, handle) in zip(rows, self._handles.items(), strict=True):
            row["gpu"] = gpu
            since_ns, before = self._samples.pop(gpu, (0, None))
            now = self._sample(handle)
            if now is not None:
                self._samples[gpu] = now_ns, now
            if before is not None and now is not None:
                row["interval_ns"] = now_ns - since_ns
                for name, value in self._means(before, now):
                    row[name] = value
            if before is not None:
                self._free(before)
        return rows[rows["interval_ns"] > 0]

    def close(self) -> None:
        """Free the last samples."""
        for _, sample in self._samples.values():
            self._free(sample)
        self._samples.clear()

    def _has_counters(self, handle: Any) -> bool:
        call = getattr(self._nvml, "nvmlGpmQueryDeviceSupport", None)  # bindings before 12 lack it
        support = query(self._nvml, call, handle) if call else None
        return bool(support and support.isSupportedDevice)

    def _sample(self, handle: Any) -> Any:
        sample = query(self._nvml, self._nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return None
        if query(self._nvml, self._nvml.nvmlGpmSampleGet, handle, sample) is None:
            self._free(sample)
            return None
        return sample

    def _free(self, sample: Any) -> None:
        query(self._nvml, self._nvml.nvmlGpmSampleFree, sample)

    def _means(self, before: Any, now: Any) -> Iterator[tuple[str, int]]:
        nvml = self._nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
        request.sample1, request.sample2 = before, now
        for entry, (metric, _) in zip(request.metrics, _METRICS.values(), strict=False):
            entry.metricId = getattr(nvml, metric)
        if query(nvml, nvml.nvmlGpmMetricsGet, request) is None:
            return
        for entry, (name, (_, factor)) in zip(request.metrics, _METRICS.items(), strict=False):
            is_known = entry.nvmlReturn == nvml.NVML_SUCCESS and entry.value >= 0  # NaN is not
            yield name, round(entry.value * factor) if is_known else UNKNOWN
