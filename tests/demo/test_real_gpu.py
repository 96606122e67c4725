"""GPUs that the demo finds, and its requests to the driver, which a stub replaces."""

import ctypes
import subprocess

import pytest
from typer.testing import CliRunner

from stallscope.cli import app
from stallscope.demo import real_gpu
from stallscope.demo.gpu import Gpu
from stallscope.demo.live_demo import plan_for
from stallscope.demo.real_gpu import DRIVER, TimedKernel, libraries
from stallscope.errors import BadInput, NotFound

STUB = r"""
#include <string.h>
typedef unsigned long long u64;
static u64 launched_ns; static int loads;
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *n) { *n = N_GPUS; return 0; }
int cuModuleLoadData(void **module, const char *text)
{
    loads++;
    *module = &loads;
    return !strstr(text, ".entry timed(");
}
int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = &launched_ns;
    return strcmp(name, "timed");
}
int cuLaunchKernel(void *function, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                   unsigned shared, void *stream, void **arguments, void **extra)
{
    *(u64 *)function += *(u64 *)arguments[0];
    return a * b * c * d * e * f != 1 || stream != (void *)7;
}
u64 total_ns(void) { return launched_ns; }
int n_loads(void) { return loads; }
int cudaFree(void *nothing) { return 0; }
"""


@pytest.fixture
def driver(tmp_path):
    """Builds a stub of the driver, and of the only runtime function that the kernel needs."""

    def built(n_gpus=4, init=0):
        source, library = tmp_path / "stub.c", tmp_path / f"stub{n_gpus}{init}.so"
        source.write_text(STUB)
        words = [f"-DN_GPUS={n_gpus}", f"-DINIT={init}", "-shared", "-fPIC", "-o", library, source]
        subprocess.run(["gcc", *words], check=True)
        return str(library)

    return built


@pytest.fixture
def folder(tmp_path):
    """Libraries as in wheels and toolkits; the libraries of CUDA 13 do not run on a driver of CUDA 12."""
    for name in ("nccl/lib/libnccl.so.2", "runtime/lib/libcudart.so.13", "old/lib/libcudart.so.11.0"):
        path = tmp_path / "nvidia" / name
        path.parent.mkdir(parents=True)
        path.touch()
    toolkit = tmp_path / "nvidia" / "toolkit" / "lib"
    toolkit.mkdir(parents=True)
    (toolkit / "libcudart.so.12.4.127").touch()
    (toolkit / "libcudart.so.12").symlink_to("libcudart.so.12.4.127")
    return tmp_path / "nvidia"


@pytest.mark.compiler
def test_the_newest_libraries_that_fit_the_driver_are_taken(driver, folder, tmp_path):
    there = libraries(driver(), [f"{folder}/*/lib"])
    assert there.n_gpus == 4
    assert there.cudart == folder / "toolkit" / "lib" / "libcudart.so.12.4.127"
    assert there.nccl == folder / "nccl" / "lib" / "libnccl.so.2"
    (tmp_path / "links").mkdir()
    linked = there.linked_in(tmp_path / "links")
    assert {path.name: path.resolve() for path in linked.iterdir()} == {
        "libcudart.so.12": there.cudart,
        "libnccl.so.2": there.nccl,
    }


@pytest.mark.compiler
def test_the_missing_component_is_named(driver, folder):
    with pytest.raises(NotFound, match=r"no CUDA runtime for this driver \(CUDA 12\) was found.*pip install"):
        libraries(driver(), [str(folder / "nccl" / "lib")])
    with pytest.raises(NotFound, match=r"\(CUDA 12\) was found, only .*libcudart\.so\.13"):
        libraries(driver(), [str(folder / "runtime" / "lib")])
    with pytest.raises(NotFound, match=r"NCCL .* was not found"):
        libraries(driver(), [str(folder / "toolkit" / "lib")])
    with pytest.raises(NotFound, match="none is visible"):
        libraries(driver(n_gpus=0), [])
    with pytest.raises(NotFound, match="the driver returns code 100"):
        libraries(driver(init=100), [])
    with pytest.raises(NotFound, match=r"no NVIDIA driver .* was found"):
        libraries("libcuda-that-is-not-there.so.1", [])


@pytest.mark.compiler
def test_the_kernel_is_loaded_once_and_given_its_time(driver):
    stub = ctypes.CDLL(driver())
    stub.total_ns.restype = ctypes.c_uint64
    kernel = TimedKernel(stub, driver())
    kernel.launch(5_000_000_000, 7)
    kernel.launch(1, 7)
    assert (stub.total_ns(), stub.n_loads()) == (5_000_000_001, 1)


def test_without_a_gpu_the_demo_names_the_missing_component():
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        done = CliRunner().invoke(app, ["demo", "straggler", "--gpu"])
        assert isinstance(done.exception, NotFound)
        assert "without --gpu" in str(done.exception)
    else:
        pytest.skip("there is a driver here")


def test_scenarios_for_emulated_gpus_are_refused_on_real_gpus(monkeypatch):
    monkeypatch.setattr("stallscope.commands.demo._gpus", lambda: real_gpu.GpuLibraries(None, None, 4))
    done = CliRunner().invoke(app, ["demo", "gpu-steal", "--gpu"])
    assert isinstance(done.exception, BadInput)
    done = CliRunner().invoke(app, ["demo", "hang", "--gpu", "--no-bpf"])
    assert isinstance(done.exception, BadInput)


def test_one_real_gpu_is_one_rank(tmp_path):
    plan = plan_for("copy", ranks=1, libraries=tmp_path)
    assert (plan.ranks, plan.victim, plan.libraries) == (1, 0, str(tmp_path))
    with pytest.raises(BadInput, match="1 ranks"):
        plan_for("copy", ranks=1)


@pytest.mark.gpu
def test_a_kernel_runs_for_the_requested_time(tmp_path):
    gpu = Gpu(libraries().linked_in(tmp_path))
    gpu.call("cudaSetDevice", 0)
    begin, end = (gpu.new("cudaEventCreateWithFlags", 0) for _ in range(2))
    gpu.launch(1_000_000)
    gpu.call("cudaEventRecord", begin, None)
    gpu.launch(20_000_000)
    gpu.call("cudaEventRecord", end, None)
    gpu.synchronize()
    took_ms = ctypes.c_float()
    gpu.call("cudaEventElapsedTime", ctypes.byref(took_ms), begin, end)
    assert 19 < took_ms.value < 40
