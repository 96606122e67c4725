"""GPUs and their driver: NVML state, device numbers, ioctls."""

from stallscope.capture.gpu import nvml
from stallscope.capture.gpu.drivers import majors
from stallscope.capture.gpu.gpu_state import GpuStates

__all__ = ["GpuStates", "majors", "nvml"]
