"""Tables that other interfaces show: rows by process, chains of slow calls, groups of similar stacks."""

from stallscope.diagnose.gpu.gpu_rounds import on_host_clock as kernels_on_host_clock
from stallscope.diagnose.serving.endpoints import Endpoint, endpoints
from stallscope.diagnose.timeline.user_frame import in_own_code
from stallscope.diagnose.views.by_process import ProcessRow, as_rows, container_rows, process_rows
from stallscope.diagnose.views.kernel_table import OTHER_KERNELS, GpuWindow, gpu_windows, is_nccl_kernel
from stallscope.diagnose.views.slow_calls import Chain, chains
from stallscope.diagnose.views.stack_groups import ProcessStack, StackGroup, groups, latest_stacks

__all__ = [
    "OTHER_KERNELS",
    "Chain",
    "Endpoint",
    "GpuWindow",
    "ProcessRow",
    "ProcessStack",
    "StackGroup",
    "as_rows",
    "chains",
    "container_rows",
    "endpoints",
    "gpu_windows",
    "groups",
    "in_own_code",
    "is_nccl_kernel",
    "kernels_on_host_clock",
    "latest_stacks",
    "process_rows",
]
