"""A PyTorch training job on all GPUs of this machine, with faults, and each rank's own clock.

    python job.py --folder F --kind ddp --sync --fault sleep:2:14:290 --seconds 10

Without RANK in the environment it starts one process a GPU itself (torchrun does as well). Each rank writes
rank<R>.csv and prints "ready" when it is warm; truth.json lists the disturbed ranks and their faults. With --gate the
ranks load their libraries and wait for a file "go" in the folder; --seconds 0 runs until a file "stop" is there.
"""

import argparse
import gc
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import faults
from faults import Fault

COLUMNS = "step,start_ns,begin_ns,forward_ns,end_ns,is_disturbed"
"""Of the CSV: begin_ns is after the batch and the fault, forward_ns after the forward pass was issued."""

STEPS_BETWEEN_READS = 50  # of the loss, in a job that does not synchronise each step
WARM_STEPS = 5
POLL_S = 0.01
RUNNING_S = 1.2
N_TURNS, TURN = 3, 25  # some 40 us each


class Shape(NamedTuple):
    """A model: layers of a width, and the rows of a batch. On the CPU small ones, for trying the loop."""

    n_layers: int
    width: int
    n_rows: int


SHAPES = {
    "ddp": Shape(8, 4096, 8192),
    "small": Shape(8, 1024, 8192),
    "fsdp": Shape(8, 4096, 32768),
    "tp": Shape(8, 8192, 8192),
    "launch": Shape(60, 256, 64),
    "graph": Shape(60, 512, 256),
    "inference": Shape(24, 1024, 8),
    "requests": Shape(24, 1024, 64),
    "decode": Shape(20, 512, 8),
}
ON_CPU = Shape(4, 128, 64)
WIDTH_OF_HEAD, N_CACHED = 64, 256

Step = Callable[[Any], Any]
"""Issues one whole step for a batch; returns the loss. The first element of the pair is the forward pass."""


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=SHAPES, default="ddp")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="0: one a GPU")
    parser.add_argument("--sync", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fault", action="append", default=[], type=faults.parsed)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--steps", type=int, default=0, help="number of steps; 0: no limit")
    parser.add_argument("--rows", type=int, default=0, help="rows of a batch; 0: the default of the kind")
    parser.add_argument("--pin", action="store_true", help="each rank, once it is warm, to a CPU of its own")
    parser.add_argument(
        "--speed", action="store_true", help="measure the CPU's between two steps: speed<R>.csv"
    )
    parser.add_argument("--alone", action="store_true", help="each rank is a job of its own")
    parser.add_argument(
        "--one-gpu", action="store_true", help="NCCL takes each rank for a machine of its own"
    )
    parser.add_argument("--gate", action="store_true")
    return parser.parse_args()


# The launcher


def launch(chosen: argparse.Namespace) -> int:
    """Starts the ranks, disturbs them from outside, and waits. Returns the worst exit code."""
    n_ranks = chosen.ranks or n_gpus()
    chosen.fault = faults.placed(chosen.fault, n_ranks)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env=environment | of_rank(chosen, rank),
        )
        for rank in range(n_ranks)
    ]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        write_truth(chosen, [rank.pid for rank in ranks], n_ranks, intervals_ns=[])
        stop = next((fault for fault in chosen.fault if fault.name == "stop"), None)
        if stop:
            intervals_ns = stop_and_continue(ranks, chosen.folder, stop)
            write_truth(chosen, [rank.pid for rank in ranks], n_ranks, intervals_ns=intervals_ns)
        return first_failure(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def of_rank(chosen: argparse.Namespace, rank: int) -> dict[str, str]:
    """The environment of a rank. NCCL refuses two ranks on a GPU, unless they are on different machines."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if chosen.one_gpu:
        own |= {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return own


def first_failure(ranks: list["subprocess.Popen[bytes]"]) -> int:
    """Waits for all ranks; as soon as one fails, its exit code. The others would wait for it."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((code for code in codes if code), 0)
        if failed or None not in codes:
            return failed
        time.sleep(0.05)


def n_gpus() -> int:
    """GPUs that the driver lists."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def free_port() -> int:
    """A port for the rendezvous."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def stop_and_continue(
    ranks: list["subprocess.Popen[bytes]"], folder: Path, fault: Fault
) -> list[tuple[int, int]]:
    """Stops the victim again and again until it ends; when (monotonic ns)."""
    while not (folder / f"ready{fault.rank}").exists():
        if ranks[fault.rank].poll() is not None:
            return []
        time.sleep(POLL_S)
    intervals_ns, victim = [], ranks[fault.rank]
    time.sleep(RUNNING_S)
    with suppress(ProcessLookupError):
        while all(rank.poll() is None for rank in ranks) and not (folder / "ending").exists():
            begin_ns = time.monotonic_ns()
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(fault.delay_ms / 1e3)
            os.kill(victim.pid, signal.SIGCONT)
            intervals_ns.append((begin_ns, time.monotonic_ns()))
            time.sleep(RUNNING_S)
    return intervals_ns


def write_truth(
    chosen: argparse.Namespace, pids: list[int], n_ranks: int, *, intervals_ns: list[tuple[int, int]]
) -> None:
    """Writes truth.json, the right answer of a diagnosis."""
    truth = {
        "n_ranks": n_ranks,
        "pids": pids,
        "faults": [
            {
                "name": fault.name,
                "cause": fault.kind.cause,
                "rank": fault.rank if fault.rank >= 0 else None,
                "every_steps": fault.every,
            }
            for fault in chosen.fault
        ],
        "stopped_ns": intervals_ns,
    }
    (chosen.folder / "truth.json").write_text(json.dumps(truth, indent=1))


# One rank


class Rank(NamedTuple):
    """The state of a rank: its device, its batch, and a step in two halves."""

    rank: int
    n_ranks: int
    device: str
    batch: Any
    forward: Callable[[Any], Any]
    backward: Callable[[Any], None]


def open_rank(chosen: argparse.Namespace) -> Rank:
    """Joins the others and builds the model."""
    import torch
    import torch.distributed as dist

    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    if chosen.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        own: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if chosen.alone else {}
        dist.init_process_group("nccl", device_id=device, **own)
    else:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    shape = SHAPES[chosen.kind] if chosen.device == "cuda" else ON_CPU
    shape = shape._replace(n_rows=chosen.rows or shape.n_rows)
    dtype = torch.bfloat16 if chosen.device == "cuda" else torch.float32
    batch = torch.randn(shape.n_rows, shape.width, device=chosen.device, dtype=dtype)
    build = blocks if chosen.kind == "inference" else layers
    model = torch.nn.Sequential(*build(shape, {"device": chosen.device, "dtype": dtype}))
    forward, backward = STEPS[chosen.kind](model, batch)
    return Rank(rank, n_ranks, chosen.device, batch, forward, backward)


def layers(shape: Shape, where: dict[str, Any]) -> Iterator[Any]:
    """Linear layers of one width. where: device and type of the weights."""
    import torch

    for _ in range(shape.n_layers):
        yield torch.nn.Linear(shape.width, shape.width, **where)
        yield torch.nn.GELU()


def blocks(shape: Shape, where: dict[str, Any]) -> Iterator[Any]:
    """Blocks of a transformer that make one more token of each row; those before it are in the cache."""
    import torch
    from torch.nn.functional import gelu, scaled_dot_product_attention

    width, parts = shape.width, (shape.n_rows, 3, shape.width // WIDTH_OF_HEAD, 1, WIDTH_OF_HEAD)
    cached = (shape.n_rows, shape.width // WIDTH_OF_HEAD, N_CACHED, WIDTH_OF_HEAD)

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.LayerNorm(width, **where) for _ in range(2))
            self.parts, self.out = (torch.nn.Linear(width, n * width, **where) for n in (3, 1))
            self.up, self.down = (
                torch.nn.Linear(*sizes, **where) for sizes in ((width, 4 * width), (4 * width, width))
            )
            self.keys, self.values = (torch.randn(cached, **where) for _ in range(2))

        def forward(self, rows: Any) -> Any:
            query, key, value = self.parts(self.first(rows)).view(parts).unbind(1)
            keys, values = torch.cat((self.keys, key), 2), torch.cat((self.values, value), 2)
            rows = rows + self.out(scaled_dot_product_attention(query, keys, values).reshape(rows.shape))
            return rows + self.down(gelu(self.up(self.second(rows))))

    for _ in range(shape.n_layers):
        yield Block()


def plain(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """A step of a model that reduces its gradients itself."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def forward(rows: Any) -> Any:
        return model(rows).float().pow(2).mean()

    def backward(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return forward, backward


def ddp(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """Distributed data parallel: gradients are all-reduced in buckets during the backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    ids = [batch.device.index] if batch.is_cuda else None
    return plain(DistributedDataParallel(model, device_ids=ids), batch)


def fsdp(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """Fully sharded (FSDP2): each layer's weights are all-gathered, its gradients reduce-scattered."""
    import torch
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return plain(fully_shard(model), batch)


def tensor_parallel(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """Each layer is split between all ranks, by columns and by rows in turn: an all-reduce for two layers."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.broadcast(batch, 0)
    mesh = init_device_mesh(batch.device.type, (dist.get_world_size(),))
    linear = [name for name, layer in model.named_children() if isinstance(layer, torch.nn.Linear)]
    plan = {
        name: RowwiseParallel() if number % 2 else ColwiseParallel() for number, name in enumerate(linear)
    }
    return plain(parallelize_module(model, mesh, plan), batch)


def graph(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """A CUDA graph of the whole step, with one all-reduce of all gradients in it."""
    import torch
    import torch.distributed as dist

    parameters = list(model.parameters())

    def whole() -> Any:
        loss = model(batch).float().pow(2).mean()
        gradients = torch.autograd.grad(loss, parameters)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        with torch.no_grad():
            at = 0
            for parameter in parameters:
                n = parameter.numel()
                parameter.sub_(flat[at : at + n].view_as(parameter), alpha=1e-4)
                at += n
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            whole()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events at the same time, which must not end the graph capture.
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        loss = whole()

    def forward(rows: Any) -> Any:
        captured.replay()
        return loss

    return forward, lambda loss: None


def decode(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """A token: one CUDA graph of the forward pass, some 100 us. No collectives."""
    import torch

    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            token = model(batch).float().sum()

    def forward(rows: Any) -> Any:
        captured.replay()
        return token

    return forward, lambda loss: None


def inference(model: Any, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any], None]]:
    """A request: rows are copied to the GPU, go through the model, and the answer is copied back. No collectives."""
    import torch

    question = torch.randn(batch.shape, dtype=batch.dtype, pin_memory=batch.is_cuda)

    def forward(rows: Any) -> Any:
        with torch.inference_mode():
            answer = model(question.to(rows.device, non_blocking=True))
            return answer.float().mean(dim=1).cpu().sum()

    return forward, lambda loss: None


STEPS: dict[str, Callable[[Any, Any], tuple[Callable[[Any], Any], Callable[[Any], None]]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "tp": tensor_parallel,
    "launch": ddp,
    "small": ddp,
    "graph": graph,
    "inference": inference,
    "requests": inference,
    "decode": decode,
}


class Ending:
    """How the ranks agree on their last step, without a collective that no training job would make.

    Rank 0 writes the number into a shared file, far enough ahead that no rank has passed it yet.
    """

    def __init__(self, chosen: argparse.Namespace, rank: int):
        path = chosen.folder / "last_step"
        path.open("ab").close()
        if path.stat().st_size < 8:
            os.truncate(path, 8)
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 8)
        self._folder: Path = chosen.folder
        self._seconds: float = chosen.seconds
        self._n_steps: int = chosen.steps
        self._leads = rank == 0
        self._ahead = 10 if chosen.sync else 3 * STEPS_BETWEEN_READS
        self._end_ns: int | None = None

    def begin(self) -> None:
        """The seconds count from now."""
        if self._seconds:
            self._end_ns = time.monotonic_ns() + int(self._seconds * 1e9)

    def is_over(self, step: int) -> bool:
        """Whether `step` is after the last one."""
        if self._n_steps:
            return step >= self._n_steps
        last = int(struct.unpack("q", self._shared[:8])[0])
        if self._leads and not last and self._is_wanted():
            last = step + self._ahead
            (self._folder / "ending").touch()
            self._shared[:8] = struct.pack("q", last)
        return bool(last) and step >= last

    def _is_wanted(self) -> bool:
        if self._end_ns is not None:
            return time.monotonic_ns() > self._end_ns
        return (self._folder / "stop").exists()


def disturbances(chosen: argparse.Namespace, me: Rank) -> list[tuple[Fault, Callable[[], None]]]:
    """The faults that can strike this rank, prepared."""
    return [
        (fault, fault.kind.prepare(me.device, fault.delay_ms))
        for fault in chosen.fault
        if fault.kind.prepare and fault.rank in (me.rank, faults.EVERY_RANK)
    ]


def loader(chosen: argparse.Namespace, rank: int) -> Iterator[Any] | None:
    """A data loader with one worker process, where the faults ask for one."""
    fault = next((fault for fault in chosen.fault if fault.name == "input"), None)
    if not fault:
        return None
    from torch.utils.data import DataLoader, IterableDataset

    class Batches(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return faults.items(slow)

    slow = fault if fault.rank == rank else None
    batches: Iterator[Any] = iter(DataLoader(Batches(), batch_size=None, num_workers=1, prefetch_factor=2))
    return batches


def train(chosen: argparse.Namespace, me: Rank) -> None:
    """Steps until the ranks agree to end; writes the rank's clock."""
    disturbs, batches, ending = disturbances(chosen, me), loader(chosen, me.rank), Ending(chosen, me.rank)
    step = 0
    operand = me.batch.new_zeros(64, device="cpu")
    speed = chosen.folder / f"speed{me.rank}.csv" if chosen.speed else os.devnull
    with (
        (chosen.folder / f"rank{me.rank}.csv").open("w", buffering=1) as clock,
        Path(speed).open("w", buffering=1) as speeds,
    ):
        print(COLUMNS, file=clock)
        while not ending.is_over(step):
            start_ns = time.monotonic_ns()
            if batches is not None:
                next(batches)
            is_disturbed = is_late_by_loader(chosen, me.rank, step)
            for fault, disturb in disturbs:
                if fault.is_due(me.rank, step, n_ranks=me.n_ranks):
                    disturb()
                    is_disturbed = True
            begin_ns = time.monotonic_ns()
            loss = me.forward(me.batch)
            forward_ns = time.monotonic_ns()
            me.backward(loss)
            if chosen.sync or (step + 1) % STEPS_BETWEEN_READS == 0:
                loss.item()  # waits for all that was issued
            end_ns = time.monotonic_ns()
            print(f"{step},{start_ns},{begin_ns},{forward_ns},{end_ns},{int(is_disturbed)}", file=clock)
            if chosen.speed:
                print(f"{step},{turn_ns(operand)}", file=speeds)
            step += 1
            if step == WARM_STEPS:
                if chosen.pin:
                    pin(me)
                say_ready(chosen, me, ending)
    synchronize(me.device)


def is_late_by_loader(chosen: argparse.Namespace, rank: int, step: int) -> bool:
    """Whether the batch of this step was made late."""
    return any(
        fault.name == "input" and fault.rank == rank and fault.is_due(rank, step, n_ranks=1)
        for fault in chosen.fault
    )


def turn_ns(operand: Any) -> int:
    """How long a few operations on the CPU take now, which take the framework's way to a launch but the last part: the
    median of some turns, so that no interrupt is in it.
    """
    took_ns = []
    for _ in range(N_TURNS):
        begin_ns = time.perf_counter_ns()
        for _ in range(TURN):
            operand.add(operand)
        took_ns.append(time.perf_counter_ns() - begin_ns)
    return sorted(took_ns)[N_TURNS // 2]


def pin(me: Rank) -> None:
    """Pins all threads of this rank to one CPU; ranks are far apart, and the first CPU (interrupts) is unused."""
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[(2 * me.rank + 1) * len(cpus) // (2 * me.n_ranks)]
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {own})


def say_ready(chosen: argparse.Namespace, me: Rank, ending: Ending) -> None:
    """Report that this rank is warm, with its process."""
    synchronize(me.device)
    part = chosen.folder / f"ready{me.rank}.part"
    part.write_text(str(os.getpid()))
    part.replace(chosen.folder / f"ready{me.rank}")
    ending.begin()
    print("ready", flush=True)


def synchronize(device: str) -> None:
    """Waits for the GPU."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def run(chosen: argparse.Namespace) -> None:
    """One rank, from its libraries to its end."""
    import torch.distributed as dist

    if chosen.gate:
        (chosen.folder / f"loaded{os.environ['RANK']}").touch()
        while not (chosen.folder / "go").exists():
            time.sleep(POLL_S)
    me = open_rank(chosen)
    gc.collect()
    gc.disable()  # a garbage collection in one rank would be an unplanned fault
    train(chosen, me)
    dist.destroy_process_group()


def main() -> None:
    """Launch, or be a rank."""
    chosen = options()
    if "RANK" not in os.environ:
        sys.exit(launch(chosen))
    chosen.fault = faults.placed(chosen.fault, int(os.environ["WORLD_SIZE"]))
    run(chosen)


if __name__ == "__main__":
    main()
