"""The job that `stallscope trace -- COMMAND` starts, and the description of the process that `--pid` names."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.capture.probes import discovery
from stallscope.errors import BadInput, NotFound

_MAX_COMMAND_LENGTH = 60


@dataclass
class Job:
    """A started process that waits to execute its command. gate: written to start it. ended: set at its end."""

    pid: int
    gate: int
    ended: threading.Event = field(default_factory=threading.Event)
    _status: int = 0

    def start(self) -> None:
        """Let the process execute its command."""
        with suppress(OSError):
            os.write(self.gate, b"1")
        threading.Thread(target=self._wait, daemon=True, name="job").start()

    def exit_code(self) -> int:
        """Wait for the end. Returns the exit code, 128 + N after signal N."""
        self.ended.wait()
        code = os.waitstatus_to_exitcode(self._status)
        return code if code >= 0 else 128 - code

    def _wait(self) -> None:
        _, self._status = os.waitpid(self.pid, 0)
        self.ended.set()


@contextmanager
def waiting(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Job]:
    """The process of a job before its first instruction. It gets SIGTERM if the block raises an error.

    environment: of the job. Under sudo the job runs as the user who called sudo. Raises NotFound for a command that
    does not exist, BadInput for a file that is not executable.
    """
    if Path(command[0]).is_file() and not os.access(command[0], os.X_OK):
        raise BadInput(
            f"{command[0]}: the file is not executable; start it with its interpreter, or: chmod +x"
        )
    if not shutil.which(command[0]):
        raise NotFound(f"{command[0]}: the command was not found; give a path, or check PATH")
    gate, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(begin)
        _execute(command, dict(environment), gate)
    os.close(gate)
    job = Job(pid, begin)
    try:
        yield job
    except BaseException:
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
        raise
    finally:
        os.close(begin)


def _execute(command: Sequence[str], environment: dict[str, str], gate: int) -> None:
    """In the new process: wait for the gate, become the user's process, and execute the command. Never returns."""
    try:
        if not os.read(gate, 1):
            os._exit(125)  # tracing did not begin
        os.close(gate)
        _become_caller(environment)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and a job would inherit that
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        os.write(2, f"stallscope: cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _become_caller(environment: dict[str, str]) -> None:
    """Under sudo, become the user who called it, with that user's home in the environment."""
    user = os.environ.get("SUDO_UID", "")
    if os.geteuid() != 0 or not user.isdecimal() or int(user) == 0:
        return
    entry = pwd.getpwuid(int(user))
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    environment |= {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}


def described(pid: int, proc: Path = Path("/proc")) -> str:
    """One line on a process: its command, its user, and the GPU libraries that it has loaded.

    Raises NotFound for a process that does not exist.
    """
    home = proc / str(pid)
    try:
        words = (home / "cmdline").read_bytes().split(b"\0")
        uid = home.stat().st_uid
    except OSError:
        raise NotFound(
            f"process {pid} does not exist: check the number, or omit --pid to trace all processes"
        ) from None
    text = " ".join(word.decode("utf-8", "replace") for word in words).strip()
    text = "".join(letter if letter.isprintable() else "?" for letter in text) or "a kernel thread"
    text = text if len(text) <= _MAX_COMMAND_LENGTH else text[: _MAX_COMMAND_LENGTH - 3] + "..."
    mappings = discovery.code_mappings(proc, pid)
    libraries = sorted({Path(m.name).name for m in mappings if discovery.is_gpu_library(m)})
    loaded = ", ".join(libraries) or "no NCCL or CUDA library yet; its children are traced as well"
    return f"process {pid} ({_user(uid)}): {text}; loaded: {loaded}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
