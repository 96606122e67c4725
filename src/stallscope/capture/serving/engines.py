"""Recognises the processes of inference engines by their command lines, names and mapped libraries.

    engines = Engines(running, chosen=(4711,))
    new, ended = engines.scan(time.monotonic_ns())

A process whose parent belongs to an engine belongs to it as well: workers are often started with a bare interpreter. So
does the program that has started Triton by PyTriton. A
plain Python program counts as an engine if it listens on a socket, has no rank from a launcher, and either was chosen
by number or has a model runtime mapped. So the socket calls of a training job are not recorded.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.process.process_identity import (
    environment,
    large_file,
    launcher_ranks,
    open_sockets,
    parent_pid,
    small_file,
)
from stallscope.events.layout import UNKNOWN

PYTHON = "python"
_PATTERNS = (
    ("vllm", r"vllm[./](entrypoints|v1)|(^|/)vllm\0serve\0|^VLLM::"),
    ("sglang", r"sglang[./]launch_server|(^|/)sglang\0serve\0|^sglang::"),
    ("triton", r"(^|/)tritonserver\0|(^|/)triton_python_backend_stub\0"),
    ("tgi", r"(^|/)text-generation-(launcher|router|server)\0"),
    ("tensorrt-llm", r"(^|/)trtllm-serve\0|tensorrt_llm[./]"),
    ("llama.cpp", r"(^|/)llama-server\0|\0llama_cpp[./]server"),
    ("ollama", r"(^|/)ollama\0(serve|runner)\0"),
)
_ENGINES = tuple((name, re.compile(pattern)) for name, pattern in _PATTERNS)
_LLAMA = re.compile(rb"/(libllama|xllamacpp)[-.\w]*\.so", re.MULTILINE)
_HAS_MODEL_OUTSIDE = re.compile(r"/pytriton/workspace_[^\0]*/tritonserver\0")
"""PyTriton: the model is code of the Python program that has started Triton."""

_RUNTIME = re.compile(
    rb"/(libtorch_cpu|libonnxruntime|libtensorflow_cc|libtensorflow_framework|xla_extension|libmlx|libtvm"
    rb"|_core\.cpython-\d+-mlx|libcuda|libggml)[-.\w]*\.so"
)
_PYTHON = re.compile(r"/python[0-9.]*$")
_MODEL = re.compile(
    r"\0(?:--(?:model|model-path|model-id|model-repository|model-store|served-model-name|hf-repo))[\0=]([^\0]+)"
    r"|\0-m\0([^\0]+\.gguf)\0|\0serve\0([^\0-][^\0]*)"
)
_AGAIN_S = (0, 1, 2, 4, 8, 15, 30, 60, 300)
"""Ages at which another process is examined again: it may load a library or change its name."""
_MAX_BYTES = 1 << 22
_TCP_LISTEN, _UNIX_LISTEN, _STREAM = "0A", "00010000", "0001"
"""In /proc/PID/net: TCP_LISTEN (include/net/tcp_states.h); __SO_ACCEPTCON in the flags, SOCK_STREAM as the type of a
Unix socket.
"""
_LIBRARY_SOCKETS = ("@cuda-uvmfd-", "@tmp/nccl-")
"""Unix sockets of libcuda, in every process that uses a GPU (type SOCK_SEQPACKET), and of NCCL's start."""


class Engine(NamedTuple):
    """A process of an engine. group_pid: its first process."""

    pid: int
    name: str
    model: str
    group_pid: int


@dataclass
class _Candidate:
    since_ns: int
    n_examined: int = 0


@dataclass
class Engines:
    """running: the processes in scope. chosen: the processes that the user chose by number."""

    running: Callable[[], Iterable[int]]
    chosen: Collection[int] = ()
    proc: Path = Path("/proc")
    by_pid: dict[int, Engine] = field(default_factory=dict)
    _others: dict[int, _Candidate] = field(default_factory=dict)

    def scan(self, now_ns: int) -> tuple[list[Engine], list[int]]:
        """The new processes of engines, also those that have a new group, and the processes that have ended."""
        present = set(self.running())
        ended = [pid for pid in self.by_pid if pid not in present]
        for pid in ended:
            del self.by_pid[pid]
        self._others = {pid: known for pid, known in self._others.items() if pid in present}
        due = {pid for pid in present - self.by_pid.keys() if self._is_due(pid, now_ns)}
        new = []
        for pid in self._parents_first(due):
            if engine := self._examined(pid):
                for each in (engine, *self._program_with_model(engine), *self._children(engine)):
                    self.by_pid[each.pid] = each
                    self._others.pop(each.pid, None)
                    new.append(each)
        return new, ended

    def _children(self, engine: Engine) -> list[Engine]:
        """The engines that a process has started and that were recognised before it, now in its group."""
        groups = {pid for pid, each in self.by_pid.items() if each.group_pid == pid}
        started = {pid for pid in groups if parent_pid(pid, self.proc) == engine.pid}
        return [
            each._replace(group_pid=engine.group_pid)
            for each in self.by_pid.values()
            if each.group_pid in started
        ]

    def _parents_first(self, pids: Iterable[int]) -> Iterator[int]:
        """The processes, each after its parent. Numbers wrap around: a parent may have a larger number."""
        left = set(pids)
        for pid in sorted(left):
            chain = []
            while pid in left:
                left.remove(pid)
                chain.append(pid)
                pid = parent_pid(pid, self.proc)
            yield from reversed(chain)

    def _program_with_model(self, engine: Engine) -> list[Engine]:
        """The parent of an engine's process, if the model is code of the parent; otherwise no process."""
        words = small_file(f"{self.proc}/{engine.pid}/cmdline", 1 << 16).decode("utf-8", "replace")
        parent = parent_pid(engine.pid, self.proc)
        is_outside = _HAS_MODEL_OUTSIDE.search(words) and parent > 1 and parent not in self.by_pid
        return [engine._replace(pid=parent)] if is_outside else []

    def _is_due(self, pid: int, now_ns: int) -> bool:
        known = self._others.setdefault(pid, _Candidate(now_ns))
        n = min(known.n_examined, len(_AGAIN_S) - 1)
        if known.n_examined >= len(_AGAIN_S) or now_ns - known.since_ns < _AGAIN_S[n] * 10**9:
            return False
        known.n_examined += 1
        return True

    def _examined(self, pid: int) -> Engine | None:
        words = small_file(f"{self.proc}/{pid}/cmdline", 1 << 16).decode("utf-8", "replace")
        if not words:
            return None  # a thread of the kernel, or an ended process
        parent = self.by_pid.get(parent_pid(pid, self.proc))
        name = engine_of(words) or (parent.name if parent else "") or self._by_libraries(pid)
        if not name:
            return None
        model = model_of(words) or (parent.model if parent else "")
        return Engine(pid, name, model, parent.group_pid if parent else pid)

    def _by_libraries(self, pid: int) -> str:
        """llama.cpp or a plain Python program, by the mapped libraries; empty for another program."""
        try:
            program = str((self.proc / str(pid) / "exe").readlink()).removesuffix(" (deleted)")
        except OSError:
            return ""
        if not _PYTHON.search(program):
            return ""
        maps = large_file(self.proc / str(pid) / "maps", _MAX_BYTES)
        if _LLAMA.search(maps):
            return "llama.cpp"
        is_candidate = pid in self.chosen or _RUNTIME.search(maps)
        return PYTHON if is_candidate and _has_no_rank(self.proc, pid) and listens(self.proc, pid) else ""


def _has_no_rank(proc: Path, pid: int) -> bool:
    return launcher_ranks(environment(proc / str(pid)))[0] == UNKNOWN


def listens(proc: Path, pid: int) -> bool:
    """Whether a process listens on a TCP or Unix socket, by the kernel's lists in /proc/PID/net.

    Sockets of CUDA's libraries do not count.
    """
    opened = {str(inode) for inode in open_sockets(proc / str(pid))}
    if not opened:
        return False
    rows = [words for name in ("tcp", "tcp6") for words in _rows_of(proc / str(pid) / "net" / name)]
    listening = {words[9] for words in rows if len(words) > 9 and words[3] == _TCP_LISTEN}
    rows = _rows_of(proc / str(pid) / "net" / "unix")
    listening |= {
        words[6]
        for words in rows
        if len(words) > 6
        and (words[3], words[4]) == (_UNIX_LISTEN, _STREAM)
        and not (len(words) > 7 and words[7].startswith(_LIBRARY_SOCKETS))
    }
    return not opened.isdisjoint(listening)


_LOCAL = ("0100007F", "00000000", "0" * 32)
"""127.0.0.1, 0.0.0.0 and :: in /proc/PID/net, on little-endian machines."""


def listening_ports(proc: Path, pid: int) -> set[int]:
    """The TCP ports on which a process listens at 127.0.0.1 or at all addresses."""
    opened = {str(inode) for inode in open_sockets(proc / str(pid))}
    rows = [words for name in ("tcp", "tcp6") for words in _rows_of(proc / str(pid) / "net" / name)]
    listening = [
        words[1].split(":")
        for words in rows
        if len(words) > 9 and words[3] == _TCP_LISTEN and words[9] in opened
    ]
    return {int(port, 16) for address, port in listening if address in _LOCAL}


def _rows_of(path: Path) -> list[list[str]]:
    return [line.split() for line in large_file(path, _MAX_BYTES).decode("ascii", "replace").splitlines()]


def engine_of(words: str) -> str:
    """The name of the engine that a command line starts; empty for another program. words: separated by NUL."""
    return next((name for name, pattern in _ENGINES if pattern.search(words)), "")


def model_of(words: str) -> str:
    """The name of the model in a command line: of a path, its last part; empty without a model."""
    match = _MODEL.search(words)
    if not match:
        return ""
    text = match[1] or match[2] or match[3]
    is_path = text.startswith(("/", "./", "../", "~")) or text.endswith((".gguf", ".bin"))
    return (text.rstrip("/").rpartition("/")[2] if is_path else text)[:64]
