"""NVIDIA's management library through its own bindings (nvidia-ml-py, extra `gpu`), where both are installed.

The library comes with the driver. A value that a GPU does not support (a partition, an old driver, a consumer card) is
an error of the NVML call, and unknown here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stallscope.errors import CannotTrace, remedy_for_extra

_CONTROL = Path("/dev/nvidiactl")
_NO_DRIVER = "no NVIDIA driver found (libnvidia-ml.so.1)"


@contextmanager
def library() -> Iterator[Any]:
    """The initialised bindings. Raises CannotTrace, which states the missing part."""
    try:
        import pynvml
    except ImportError:
        message = f"nvidia-ml-py is missing: {remedy_for_extra('gpu')}" if _CONTROL.exists() else _NO_DRIVER
        raise CannotTrace(message) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise CannotTrace(_reason(pynvml, error)) from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def devices(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Number and handle of each GPU. GPUs that have fallen off the bus are left out."""
    for number in range(nvml.nvmlDeviceGetCount()):
        handle = query(nvml, nvml.nvmlDeviceGetHandleByIndex, number)
        if handle is not None:
            yield number, handle


def query(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call; None where NVML does not provide it."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def text(value: Any) -> str:
    """Decode a string that older bindings return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _reason(nvml: Any, error: Any) -> str:
    messages = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: _NO_DRIVER,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded: modprobe nvidia",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "the NVIDIA driver was updated, but the old version is still loaded: restart the machine"
        ),
    }
    return messages.get(
        error.value, f"NVML: {error}; run `nvidia-smi`, and restart the driver if that also fails"
    )
