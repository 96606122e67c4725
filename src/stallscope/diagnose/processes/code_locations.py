"""Code locations of a process's samples: the user's line of a stack, and patterns of library code by purpose."""

import re

_LIBRARY = re.compile(
    r"(/site-packages/|/dist-packages/|/lib/python3\.\d+/|^<frozen |^<string>|^<stdin>|^\.\.\.|/_python_runtime/"
    r"|/stallscope/demo/gpu\.py:)"
)
_NATIVE = re.compile(r"^\S.* \([^()]+\)$")
_PYTHON = re.compile(r"^(?P<file>.+):(?P<line>\d+|\?) (?P<function>\S+)$")

COMPILES = re.compile(
    r"torch/_inductor/(compile_fx|codecache|async_compile|graph|scheduler|cpp_builder)\.py"
    r"|torch/_dynamo/(?!eval_frame\.py|decorators\.py|external_utils\.py)|torch/_functorch/aot_autograd"
    r"|triton/(compiler|runtime/build|backends/.*/compiler)|torch/utils/cpp_extension\.py|numba/core/compiler"
)
IMPORTS = re.compile(r"^<frozen importlib")
LOADS = re.compile(r"torch/utils/data/(dataloader|_utils/(fetch|pin_memory|worker|collate))\.py")
WORKS_FOR_LOADER = re.compile(
    r"torch/utils/data/_utils/worker\.py|multiprocessing/process\.py|/popen_fork\.py"
)
HELPER = re.compile(r"multiprocessing/(resource_tracker|forkserver)\.py|torch/_inductor/compile_worker")
SAVES = re.compile(
    r"torch/serialization\.py:\d+ (_?save|_legacy_save|.*writer)|torch/distributed/checkpoint/|safetensors"
    r"|(pickle|joblib).*dump|numpy/lib/(format|npyio|_npyio_impl)\.py:\d+ (save|_?savez|write_array)"
)
_SAVING_FUNCTION = re.compile(r"(checkpoint|ckpt|save_|_save|\bsave\b|snapshot)", re.IGNORECASE)
CHECKPOINTS = re.compile(r"(checkpoint|ckpt|snapshot)[^ ]*$|\.(pt|pth|safetensors|distcp)\b", re.IGNORECASE)
"""Files that hold checkpoints, by their names."""

PROGRAMS = re.compile(r"/subprocess\.py:\d+ |/popen2\.py|os\.system")
LOCKS = re.compile(r"/(threading|queue|concurrent/futures/[a-z_]+)\.py:\d+ ")
COLLECTS = re.compile(r"\bgc\b.*collect")


def user_line(frames: tuple[str, ...]) -> str:
    """The innermost frame of the user's own code as "file.py:12 function"; otherwise the innermost named frame."""
    named = [frame for frame in frames if frame != "..."]
    own = [frame for frame in named if not _NATIVE.match(frame) and not _LIBRARY.search(frame)]
    python = [frame for frame in named if not _NATIVE.match(frame)]
    return (own or python or named or [""])[0]


def matches(frames: tuple[str, ...], pattern: "re.Pattern[str]") -> bool:
    """Whether any frame of a stack matches a pattern."""
    return any(pattern.search(frame) for frame in frames)


def saves(frames: tuple[str, ...]) -> bool:
    """Whether a stack is inside a save: of a library, or in a user function with such a name."""
    if matches(frames, SAVES):
        return True
    own = (_PYTHON.match(frame) for frame in frames if not _LIBRARY.search(frame))
    return any(_SAVING_FUNCTION.search(match["function"].rpartition(".")[2]) for match in own if match)


def is_own(line: str) -> bool:
    """Whether a line belongs to the user's code, and not to a library."""
    return is_python(line) and not _LIBRARY.search(line)


def is_python(line: str) -> bool:
    """Whether a line is of Python code."""
    return bool(line) and not _NATIVE.match(line)


def function(line: str) -> tuple[str, str]:
    """File and function of a line "file.py:12 function"."""
    location, _, name = line.rpartition(" ")
    return location.rpartition(":")[0], name


def short(frame: str) -> str:
    """A frame without the folders of its file."""
    location, _, function = frame.rpartition(" ")
    return f"{location.rpartition('/')[2]} {function}" if location else frame
