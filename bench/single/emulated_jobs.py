"""Single-process jobs with known faults on the emulated CUDA library: `emulated_jobs.py NAME SECONDS`.

Prints "ready" once the library is loaded, waits for a line on its input, runs, and prints its own measurement as JSON:
name, pid, and the share of the wall clock that the fault took.
"""

import ctypes
import fcntl
import json
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stallscope.demo import build
from stallscope.demo.faults import burn
from stallscope.demo.gpu import HOST_TO_DEVICE, Gpu

Step = Callable[[], None]
KERNEL_NS = 4_000_000
SCRATCH = Path(tempfile.mkdtemp(prefix="single-", dir=os.environ.get("SINGLE_SCRATCH", "/var/tmp")))


def work(gpu: Gpu) -> None:
    """A step's own work: 4 ms of the GPU, waited for."""
    gpu.launch(KERNEL_NS)
    gpu.synchronize()


def none(gpu: Gpu) -> Step:
    return lambda: None


def compute(gpu: Gpu) -> Step:
    data = {str(i): [i] * 8 for i in range(4000)}

    def encode() -> None:
        json.dumps(data)

    return encode


def sleep(gpu: Gpu) -> Step:
    return lambda: time.sleep(0.01)


def many_syncs(gpu: Gpu) -> Step:
    value = gpu.new("cudaMalloc", 8)

    def layers() -> None:
        for _ in range(40):
            gpu.launch(150_000)
            gpu.item(value)

    return layers


def pageable(gpu: Gpu) -> Step:
    size = 64 << 20
    device, host = gpu.new("cudaMalloc", size), ctypes.create_string_buffer(size)
    return lambda: gpu.call("cudaMemcpy", device, host, size, HOST_TO_DEVICE)


def allocator(gpu: Gpu) -> Step:
    def churn() -> None:
        for _ in range(6):
            gpu.call("cudaFree", gpu.new("cudaMalloc", 256 << 20))

    return churn


def gil(gpu: Gpu) -> Step:
    def spin() -> None:
        n = 0
        while True:
            n += 1

    threading.Thread(target=spin, daemon=True).start()

    def python_work() -> None:
        for _ in range(4):
            time.sleep(0)
            sum(range(2000))

    return python_work


def thread_lock(gpu: Gpu) -> Step:
    asked: queue.Queue[int] = queue.Queue()
    answers: queue.Queue[int] = queue.Queue()

    def slow_helper() -> None:
        while True:
            asked.get()
            time.sleep(0.01)
            answers.put(1)

    threading.Thread(target=slow_helper, daemon=True).start()

    def wait() -> None:
        asked.put(1)
        answers.get()

    return wait


def file_lock(gpu: Gpu) -> Step:
    path = SCRATCH / "shared.lock"
    path.touch()
    held = multiprocessing.Event()

    def hold() -> None:
        with path.open() as file:
            while True:
                fcntl.flock(file, fcntl.LOCK_EX)
                held.set()
                time.sleep(0.012)
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(0.001)

    multiprocessing.Process(target=hold, daemon=True).start()
    held.wait()
    own_rows = path.open()

    def lock() -> None:
        fcntl.flock(own_rows, fcntl.LOCK_EX)
        fcntl.flock(own_rows, fcntl.LOCK_UN)

    return lock


def subprocess_wait(gpu: Gpu) -> Step:
    return lambda: subprocess.run(["sleep", "0.02"], check=True) and None


def full_pipe(gpu: Gpu) -> Step:
    script = "import sys,time\nwhile True:\n sys.stdin.buffer.read1(65536); time.sleep(.02)"
    reader = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, bufsize=0)

    def log() -> None:
        assert reader.stdin is not None
        reader.stdin.write(b"x" * 65536)

    return log


def upload(gpu: Gpu) -> Step:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        while connection.recv(65536):
            time.sleep(0.015)
            connection.sendall(b"k")

    if not os.fork():
        serve()
        os._exit(0)
    client = socket.create_connection(server.getsockname())

    def send_metrics() -> None:
        client.sendall(b"m" * 512)
        client.recv(1)

    return send_metrics


def loader_process(gpu: Gpu) -> Step:
    batches: multiprocessing.Queue[bytes] = multiprocessing.Queue(4)

    def prepare_batches() -> None:
        while True:
            burn(0.02)
            batches.put(b"b" * 1000)

    multiprocessing.Process(target=prepare_batches, daemon=True).start()
    return lambda: batches.get() and None


def disk_read(gpu: Gpu) -> Step:
    path = SCRATCH / "data.bin"
    path.write_bytes(os.urandom(1 << 20) * 64)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = mmap.mmap(-1, 8 << 20)
    position = [0]

    def read() -> None:
        os.preadv(descriptor, [block], position[0] % (56 << 20))
        position[0] += 8 << 20

    return read


def checkpoint(gpu: Gpu) -> Step:
    model = [os.urandom(1 << 16) for _ in range(64)]

    def save_model() -> None:
        with (SCRATCH / "model.pkl").open("wb") as file:
            pickle.dump(model, file)
            file.flush()
            os.fsync(file.fileno())

    return save_model


def page_faults(gpu: Gpu) -> Step:
    def touch() -> None:
        memory = mmap.mmap(-1, 48 << 20)
        for at in range(0, 48 << 20, 4096):
            memory[at] = 1
        memory.close()

    return touch


def launches(gpu: Gpu) -> Step:
    def tiny() -> None:
        for _ in range(400):
            gpu.launch(1_000)

    return tiny


def contention(gpu: Gpu) -> Step:
    """Another program on the same CPU."""
    os.sched_setaffinity(0, {0})
    subprocess.Popen(["taskset", "-c", "0", sys.executable, "-c", "while True: pass"])
    return lambda: burn(0.004)


def fsync(gpu: Gpu) -> Step:
    """Writes of 4 KiB with fsync: a small share of a step."""
    file = (SCRATCH / "steps.log").open("wb")

    def append_line() -> None:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())

    return append_line


JOBS: dict[str, tuple[Callable[[Gpu], Step], set[str], str]] = {
    "healthy": (none, set(), ""),
    "compute": (compute, {"host_compute"}, "encode"),
    "sleep": (sleep, {"host_sleep"}, "sleep"),
    "many_syncs": (many_syncs, {"excessive_sync"}, "layers"),
    "pageable": (pageable, {"pageable_copy", "host_device_copy"}, "pageable"),
    "allocator": (allocator, {"cuda_alloc"}, "churn"),
    "gil": (gil, {"gil"}, "spin"),
    "thread_lock": (thread_lock, {"lock_contention"}, "slow_helper"),
    "file_lock": (file_lock, {"file_lock"}, "lock"),
    "subprocess": (subprocess_wait, {"child_program"}, "subprocess_wait"),
    "full_pipe": (full_pipe, {"full_pipe"}, "log"),
    "upload": (upload, {"network_wait"}, "send_metrics"),
    "loader_process": (loader_process, {"input_starvation"}, ""),
    "disk_read": (disk_read, {"block_io"}, "read"),
    "fsync": (fsync, {"block_io"}, "append_line"),
    "checkpoint": (checkpoint, {"checkpoint"}, "save_model"),
    "page_faults": (page_faults, {"page_fault"}, "touch"),
    "launches": (launches, {"launch_bound"}, "tiny"),
    "contention": (contention, {"cpu_preemption"}, ""),
}
"""By name: the fault's set-up, the causes that are right, and the function whose line is right."""


def main() -> None:
    if sys.argv[1] == "--names":
        print("\n".join(JOBS))
        return
    name, seconds = sys.argv[1], float(sys.argv[2])
    os.setpgid(0, 0)
    gpu = Gpu(build.build())
    print("ready", flush=True)
    sys.stdin.readline()
    gpu.call("cudaSetDevice", 0)
    gpu.call("cudaSetDeviceFlags", 4)
    step = JOBS[name][0](gpu)
    print("measuring", flush=True)
    begin, spent, n = time.monotonic(), 0.0, 0
    while time.monotonic() < begin + seconds:
        work(gpu)
        at = time.monotonic()
        step()
        spent += time.monotonic() - at
        n += 1
    whole = time.monotonic() - begin
    _, causes, function = JOBS[name]
    measurement = {"name": name, "pid": os.getpid(), "share": round(spent / whole, 3), "steps": n}
    print(json.dumps(measurement | {"causes": sorted(causes), "function": function}), flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
