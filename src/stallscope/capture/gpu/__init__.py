"""GPUs and their driver: NVML state, device numbers, ioctls, and the records of NCCL's profiler plugin."""

from stallscope.capture.gpu import nvml
from stallscope.capture.gpu.drivers import majors
from stallscope.capture.gpu.gpu_state import GpuStates
from stallscope.capture.gpu.kernel_window import KernelWindow, kernel_window
from stallscope.capture.gpu.nccl_recorder import plugin_library, recorded_trace
from stallscope.capture.gpu.plugin_state import PluginState, plugin_states

__all__ = [
    "GpuStates",
    "KernelWindow",
    "PluginState",
    "kernel_window",
    "majors",
    "nvml",
    "plugin_library",
    "plugin_states",
    "recorded_trace",
]
