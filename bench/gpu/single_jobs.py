"""Single-process PyTorch jobs with one known fault each, and healthy jobs: `single_jobs.py NAME SECONDS FOLDER`.

Prints "ready" once PyTorch is imported, waits for a line on its input, warms up, prints "measuring", runs for SECONDS,
and prints its own measurement as JSON: pid, and the share of the wall clock that the fault took. Most faults are a part
of the step that the job times. A fault that slows the whole step is measured by the kernel's account of the thread
(contention, quota), by the process that stops the job, or by the growth of the step since before the fault
(interpreter lock, shared GPU). A fourth argument "profile" runs the job under torch.profiler and prints the share in
which a kernel or a copy ran on the GPU.
"""

import fcntl
import gc
import json
import mmap
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], Any]
FOLDER = Path(sys.argv[3] if len(sys.argv) > 3 else "/var/tmp")
PYTHON = sys.executable
QUOTA_GROUP = Path("/sys/fs/cgroup/single-process-bench")
WORK: list[Step] = []
"""The job's own work, once it is known."""


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


STOPPED_S = mmap.mmap(-1, 4096)
"""Shared with the process that stops this process: the time for which it was stopped."""

UNDISTURBED_S: list[float] = []
"""The length of a step before the fault, where the job's share is measured by the growth of its steps."""


def measure_step(step: Step) -> None:
    """Measure steps of the job before its fault begins."""
    assert WORK
    for _ in range(30):
        begin_s = time.monotonic()
        WORK[0]()
        step()
        UNDISTURBED_S.append(time.monotonic() - begin_s)


def kept_off_cpu_s() -> float:
    """The time for which this thread waited for a CPU, or its control group had used up its quota, so far."""
    waited_s = (
        int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    )
    with suppress(OSError, StopIteration):
        lines = QUOTA_GROUP.joinpath("cpu.stat").read_text().splitlines()
        if str(os.getpid()) in QUOTA_GROUP.joinpath("cgroup.procs").read_text().split():
            throttled_us = next(int(line.split()[1]) for line in lines if line.startswith("throttled_usec"))
            waited_s = max(waited_s, throttled_us / 1e6)
    return waited_s


class Base:
    """A step's own work: some milliseconds of matrix products."""

    def __init__(self, n_products: int = 30, size: int = 4096):
        self.a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self.n_products = n_products

    def __call__(self) -> None:
        for _ in range(self.n_products):
            torch.mm(self.a, self.b)
        torch.cuda.synchronize()


def compute_json() -> Step:
    data = {str(i): [i] * 8 for i in range(6000)}

    def encode_json() -> None:
        json.dumps(data)

    return encode_json


def compute_loop() -> Step:
    def tokenise() -> None:
        words = {}
        for i in range(60000):
            words[i % 977] = words.get(i % 977, 0) + i

    return tokenise


def collect_garbage() -> Step:
    keep = [[i] for i in range(400_000)]

    def collect() -> None:
        gc.collect()
        assert keep

    return collect


def sleeps() -> Step:
    def back_off() -> None:
        time.sleep(0.01)

    return back_off


def _small() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")


def item_each_layer() -> Step:
    a, b = _small()

    def layers() -> None:
        for _ in range(150):
            c = torch.mm(a, b)
            c.sum().item()

    return layers


def cpu_each_layer() -> Step:
    a, b = _small()

    def norms() -> None:
        for _ in range(150):
            torch.mm(a, b)[0].cpu()

    return norms


def nonzero_each_layer() -> Step:
    a, b = _small()

    def select() -> None:
        for _ in range(150):
            torch.nonzero(torch.mm(a, b)[0] > 0)

    return select


def pageable_to_device() -> Step:
    host = torch.randn(32 << 20)

    def load_batch() -> None:
        host.to("cuda")

    return load_batch


def pageable_to_host() -> Step:
    device = torch.randn(32 << 20, device="cuda")

    def fetch() -> None:
        device.cpu()

    return fetch


def empty_cache() -> Step:
    def churn() -> None:
        for _ in range(4):
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()

    return churn


def pin_each_step() -> Step:
    size = [0]

    def pin() -> None:
        size[0] += 1
        memory = torch.empty((64 << 20) + size[0] * 4096, dtype=torch.uint8)
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    return pin


def gil_spin() -> Step:
    def spin() -> None:
        n = 0
        while True:
            n += 1

    def python_work() -> None:
        for _ in range(6):
            time.sleep(0)
            sum(range(500))

    measure_step(python_work)
    threading.Thread(target=spin, daemon=True).start()
    return python_work


def thread_wait() -> Step:
    asked: queue.Queue[int] = queue.Queue()
    answers: queue.Queue[int] = queue.Queue()

    def slow_helper() -> None:
        while True:
            asked.get()
            time.sleep(0.012)
            answers.put(1)

    threading.Thread(target=slow_helper, daemon=True).start()

    def ask_helper() -> None:
        asked.put(1)
        answers.get()

    return ask_helper


def file_lock() -> Step:
    path = FOLDER / "shared.lock"
    path.touch()
    script = (
        f"import fcntl,time\nf=open({str(path)!r})\nwhile True:\n fcntl.flock(f,2); time.sleep(.015); "
        "fcntl.flock(f,8); time.sleep(.001)"
    )
    subprocess.Popen([PYTHON, "-c", script])
    time.sleep(0.3)
    file = path.open()

    def take_lock() -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)

    return take_lock


def program() -> Step:
    def run_program() -> None:
        subprocess.run(["sleep", "0.02"], check=True)

    return run_program


def program_output() -> Step:
    def ask_git() -> None:
        subprocess.run(["sh", "-c", "sleep 0.02; echo 1"], check=True, capture_output=True)

    return ask_git


def full_pipe() -> Step:
    script = "import sys,time\nwhile True:\n sys.stdin.buffer.read1(65536); time.sleep(.02)"
    reader = subprocess.Popen([PYTHON, "-c", script], stdin=subprocess.PIPE, bufsize=0)

    def write_log() -> None:
        assert reader.stdin is not None
        reader.stdin.write(b"x" * 65536)

    return write_log


def _answering(server: socket.socket) -> None:
    if not os.fork():
        connection, _ = server.accept()
        while connection.recv(65536):
            time.sleep(0.015)
            connection.sendall(b"k")
        os._exit(0)


def upload() -> Step:
    server = socket.create_server(("127.0.0.1", 0))
    _answering(server)
    client = socket.create_connection(server.getsockname())

    def send_metrics() -> None:
        client.sendall(b"m" * 512)
        client.recv(1)

    return send_metrics


class Items(Dataset[torch.Tensor]):
    """Items that cost something. kind: cpu, disk, lock, sleep."""

    def __init__(self, kind: str, seconds: float):
        self.kind, self.seconds = kind, seconds
        self.lock = multiprocessing.Lock()
        self.path = FOLDER / "items.bin"
        if kind == "disk" and not self.path.exists():
            self.path.write_bytes(os.urandom(1 << 20) * 128)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind == "cpu":
            transform(self.seconds)
        elif self.kind == "disk":
            read_item(self.path, index)
        elif self.kind == "lock":
            with self.lock:
                time.sleep(self.seconds)
        elif self.kind == "sleep":
            fetch_object(self.seconds)
        return torch.zeros(1024)


def transform(seconds: float) -> None:
    burn(seconds)


def fetch_object(seconds: float) -> None:
    time.sleep(seconds)


def read_item(path: Path, index: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = mmap.mmap(-1, 4 << 20)
    for i in range(8):
        os.preadv(descriptor, [block], ((index * 8 + i) % 31) * (4 << 20))
    os.close(descriptor)


def loader(kind: str, seconds: float, workers: int) -> Callable[[], Step]:
    def make() -> Step:
        batches = iter(DataLoader(Items(kind, seconds), batch_size=4, num_workers=workers))

        def next_batch() -> None:
            next(batches)

        next_batch()
        return next_batch

    return make


def disk_read() -> Step:
    path = FOLDER / "data.bin"
    path.write_bytes(os.urandom(1 << 20) * 64)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = mmap.mmap(-1, 8 << 20)
    position = [0]

    def read_shard() -> None:
        for _ in range(3):
            os.preadv(descriptor, [block], position[0] % (56 << 20))
            position[0] += 8 << 20

    return read_shard


def fsync_log() -> Step:
    file = (FOLDER / "steps.log").open("wb")

    def append_line() -> None:
        for _ in range(6):
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())

    return append_line


def checkpoint() -> Step:
    model = {f"layer{i}": torch.randn(1 << 20, device="cuda") for i in range(16)}

    def save_model() -> None:
        with (FOLDER / "model.pt").open("wb") as file:
            torch.save(model, file)
            os.fsync(file.fileno())

    return save_model


def checkpoint_pickle() -> Step:
    state = [{str(j): j for j in range(64)} for _ in range(3000)]

    def write_state() -> None:
        with (FOLDER / "state.pkl").open("wb") as file:
            pickle._dump(state, file)  # type: ignore[attr-defined]

    return write_state


def touch_memory() -> Step:
    def touch() -> None:
        memory = mmap.mmap(-1, 64 << 20)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)

    return touch


def cold_map() -> Step:
    path = FOLDER / "mapped.bin"
    path.write_bytes(os.urandom(1 << 20) * 64)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)

    def read_mapped() -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        memory.madvise(mmap.MADV_RANDOM)
        for at in range(0, 24 << 20, 64 << 10):
            memory[at]
        memory.close()

    return read_mapped


def recompile() -> Step:
    torch._dynamo.config.recompile_limit = 1 << 20
    torch._dynamo.config.accumulated_recompile_limit = 1 << 20
    number = [0]

    @torch.compile(backend="eager")
    def model(x: torch.Tensor, n: float) -> torch.Tensor:
        for _ in range(20):
            x = torch.relu(x * n) + 1
        return x

    x = torch.randn(64, 64, device="cuda")

    def forward() -> None:
        number[0] += 1
        torch._dynamo.reset()
        model(x, float(number[0]))

    return forward


def compile_children() -> Step | None:
    if not (compiler := shutil.which("gcc") or shutil.which("cc")):
        return None
    source = FOLDER / "one.c"
    source.write_text(
        "#include <stdio.h>\n" + "\n".join(f"int f{i}(int x){{return x*{i};}}" for i in range(400))
    )

    def build_extension() -> None:
        subprocess.run([compiler, "-O2", "-c", str(source), "-o", str(FOLDER / "one.o")], check=True)

    return build_extension


def tiny_kernels() -> Step:
    x = torch.zeros(64, device="cuda")

    def element_wise() -> None:
        for _ in range(2000):
            x.add_(1)

    return element_wise


def tiny_model() -> Step:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(60)]).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    x = torch.randn(8, 64, device="cuda")

    def train_step() -> None:
        for _ in range(4):
            model(x).sum().backward()
            optimiser.step()

    return train_step


def contention() -> Step:
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    for _ in range(2):
        subprocess.Popen(["taskset", "-c", str(cpu), PYTHON, "-c", "while True: pass"])

    def prepare() -> None:
        burn(0.003)

    return prepare


def quota() -> Step | None:
    group = QUOTA_GROUP
    try:
        group.mkdir(exist_ok=True)
        (group / "cpu.max").write_text("30000 100000")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None

    def prepare() -> None:
        burn(0.01)

    return prepare


def shared_gpu() -> Step:
    script = (
        "import torch\na=torch.randn(8192,8192,device='cuda')\n"
        "while True:\n [torch.mm(a,a) for _ in range(10)]; torch.cuda.synchronize()"
    )
    measure_step(lambda: None)
    subprocess.Popen([PYTHON, "-c", script])
    time.sleep(6)
    return lambda: None


def stopped() -> Step:
    if not os.fork():
        parent, total_s = os.getppid(), 0.0
        while os.getppid() == parent:
            os.kill(parent, signal.SIGSTOP)
            begin_s = time.monotonic()
            time.sleep(0.05)
            os.kill(parent, signal.SIGCONT)
            total_s += time.monotonic() - begin_s
            struct.pack_into("d", STOPPED_S, 0, total_s)
            time.sleep(0.05)
        os._exit(0)
    return lambda: None


def nothing() -> Step:
    return lambda: None


def conv_training() -> Step:
    model = torch.nn.Sequential(*[torch.nn.Conv2d(128, 128, 3, padding=1) for _ in range(4)]).cuda()
    optimiser = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 128, 112, 112, device="cuda")

    def train() -> None:
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()

    return train


def transformer_training() -> Step:
    model = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True).cuda().bfloat16()
    optimiser = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 1024, 2048, device="cuda", dtype=torch.bfloat16)

    def train() -> None:
        optimiser.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimiser.step()
        loss.item()

    return train


def graph_decoding() -> Step:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.mm(x, a)
    with torch.cuda.graph(graph):
        for _ in range(80):
            x = torch.mm(x, a)

    def decode() -> None:
        graph.replay()
        x[0, 0].item()

    return decode


def evaluation() -> Step:
    model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(8)]).cuda().bfloat16().eval()
    x = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def evaluate() -> None:
        model(x).argmax(-1)[0].item()

    return evaluate


def notebook() -> Step:
    n = [0]

    def cell() -> None:
        n[0] += 1
        if n[0] % 150 == 0:
            time.sleep(2.5)  # a user who reads

    return cell


def pinned_copies() -> Step:
    host = torch.empty(4 << 20).pin_memory()

    def prefetch() -> None:
        host.to("cuda", non_blocking=True)

    return prefetch


class RunAhead(Base):
    """A host that waits for its GPU every 20 steps only."""

    n = 0

    def __call__(self) -> None:
        self.n += 1
        for _ in range(self.n_products):
            torch.mm(self.a, self.b)
        if self.n % 20 == 0:
            torch.cuda.synchronize()


INPUT = {"input_starvation"}
JOBS: dict[str, tuple[Callable[[], Step | None], set[str], str]] = {
    "json": (compute_json, {"host_compute"}, "encode_json"),
    "loop": (compute_loop, {"host_compute"}, "tokenise"),
    "gc": (collect_garbage, {"host_compute"}, "collect"),
    "sleep": (sleeps, {"host_sleep"}, "back_off"),
    "item": (item_each_layer, {"excessive_sync"}, "layers"),
    "cpu": (cpu_each_layer, {"excessive_sync"}, "norms"),
    "nonzero": (nonzero_each_layer, {"excessive_sync"}, "select"),
    "pageable_in": (pageable_to_device, {"pageable_copy", "host_device_copy"}, "load_batch"),
    "pageable_out": (pageable_to_host, {"pageable_copy", "host_device_copy"}, "fetch"),
    "empty_cache": (empty_cache, {"cuda_alloc"}, "churn"),
    "pin": (pin_each_step, {"cuda_alloc"}, "pin"),
    "gil": (gil_spin, {"gil"}, "spin"),
    "thread": (thread_wait, {"lock_contention"}, "slow_helper"),
    "file_lock": (file_lock, {"file_lock"}, "take_lock"),
    "program": (program, {"child_program"}, "run_program"),
    "program_output": (program_output, {"child_program"}, "ask_git"),
    "full_pipe": (full_pipe, {"full_pipe"}, "write_log"),
    "upload": (upload, {"network_wait"}, "send_metrics"),
    "loader_few": (loader("cpu", 0.008, 1), INPUT, "burn"),
    "loader_main": (loader("cpu", 0.004, 0), INPUT, "burn"),
    "loader_disk": (loader("disk", 0, 2), INPUT, "read_item"),
    "loader_lock": (loader("lock", 0.006, 4), INPUT, "__getitem__"),
    "loader_remote": (loader("sleep", 0.02, 2), INPUT, "fetch_object"),
    "disk_read": (disk_read, {"block_io"}, "read_shard"),
    "fsync": (fsync_log, {"block_io"}, "append_line"),
    "checkpoint": (checkpoint, {"checkpoint"}, "save_model"),
    "checkpoint_py": (checkpoint_pickle, {"checkpoint"}, "write_state"),
    "new_memory": (touch_memory, {"page_fault"}, "touch"),
    "cold_map": (cold_map, {"page_fault", "block_io"}, "read_mapped"),
    "recompile": (recompile, {"recompilation"}, "forward"),
    "compiler": (compile_children, {"recompilation"}, "build_extension"),
    "tiny_kernels": (tiny_kernels, {"launch_bound"}, "element_wise"),
    "tiny_model": (tiny_model, {"launch_bound"}, "train_step"),
    "contention": (contention, {"cpu_preemption"}, ""),
    "quota": (quota, {"cpu_quota"}, ""),
    "stopped": (stopped, {"process_stopped"}, ""),
    "shared_gpu": (shared_gpu, {"gpu_shared"}, ""),
    "healthy_products": (nothing, set(), ""),
    "healthy_conv": (conv_training, set(), ""),
    "healthy_transformer": (transformer_training, set(), ""),
    "healthy_graph": (graph_decoding, set(), ""),
    "healthy_evaluation": (evaluation, set(), ""),
    "healthy_notebook": (notebook, set(), ""),
    "healthy_loader": (loader("cpu", 0.0002, 4), set(), ""),
    "healthy_pinned": (pinned_copies, set(), ""),
    "healthy_large": (nothing, set(), ""),
    "healthy_run_ahead": (nothing, set(), ""),
}
"""By name: the fault's set-up, the causes that are right, and the function whose line is right."""


def _base(name: str) -> Callable[[], None]:
    if name == "healthy_large":
        return Base(20, 8192)
    if name == "healthy_run_ahead":
        return RunAhead()
    return Base(8 if name in ("item", "cpu", "nonzero", "tiny_kernels", "tiny_model") else 40)


BY_KERNEL = ("contention", "quota")


def measured(name: str, work: Step, step: Step, seconds: float) -> dict[str, Any]:
    """Run the job's steps for some seconds, and measure the fault."""
    before_s = kept_off_cpu_s()
    begin, spent, n = time.monotonic(), 0.0, 0
    while time.monotonic() < begin + seconds:
        work()
        at = time.monotonic()
        step()
        spent += time.monotonic() - at
        n += 1
    whole = time.monotonic() - begin
    lost = spent
    if name in BY_KERNEL:
        lost = kept_off_cpu_s() - before_s
    elif name == "stopped":
        lost = struct.unpack_from("d", STOPPED_S, 0)[0]
    elif UNDISTURBED_S:
        lost = whole - n * sorted(UNDISTURBED_S)[len(UNDISTURBED_S) // 2]
    return {"share": round(min(lost / whole, 1.0), 3), "steps": n, "seconds": round(whole, 2)}


def profiled(work: Step, step: Step, seconds: float) -> dict[str, Any]:
    """The share in which a kernel or a copy ran on the GPU, by torch.profiler."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]):
        work()
    with torch.profiler.profile(activities=[activity.CUDA]) as profile:
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            work()
            step()
        torch.cuda.synchronize()
        whole_ns = (time.monotonic() - begin) * 1e9
    events = profile.profiler.kineto_results.events()
    on_gpu = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )
    busy_ns, end_ns = 0, 0
    for first, last in on_gpu:
        busy_ns += max(last - max(first, end_ns), 0)
        end_ns = max(end_ns, last)
    return {"profiler_gpu_busy": round(busy_ns / whole_ns, 3)}


def main() -> None:
    """Run one job."""
    if sys.argv[1] == "--names":
        print("\n".join(JOBS))
        return
    name, seconds, is_profiled = sys.argv[1], float(sys.argv[2]), sys.argv[4:] == ["profile"]
    os.setpgid(0, 0)
    print("ready", flush=True)
    sys.stdin.readline()
    work = _base(name)
    work()
    WORK.append(work)
    set_up, causes, function = JOBS[name]
    step = set_up()
    print("measuring", flush=True)
    out: dict[str, Any] = {"name": name, "causes": sorted(causes), "function": function}
    if step is None:
        print(json.dumps(out | {"skipped": "this machine cannot do it"}), flush=True)
        os._exit(0)
    step()
    result = profiled(work, step, seconds) if is_profiled else measured(name, work, step, seconds)
    print(json.dumps(out | {"pid": os.getpid()} | result), flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
