"""The parameters of a job: written once by the launcher, read by each rank."""

import ctypes
import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

PLAN_FILE = "plan.json"
MAX_EXTENSION_S = 45.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job. Ends after `steps` steps, or after about `seconds` when steps is 0.

    min_occurrences: of a periodic fault; on a busy machine the job lasts up to MAX_EXTENSION_S longer to have them.
    fault: name in faults.FAULTS; victim: the rank that suffers it; first_step: no fault before it.
    groups: "ddp" one communicator, "tp" additional pairs. synchronize: wait for the GPU every step; otherwise
    the host runs ahead. autograd_thread: a second thread issues the backward pass. host_work_ms: CPU time that a
    rank uses each step. loader: batches come from a child process. answer_port: of the server that the
    victim waits for; 0 none. scratch: a folder on a disk.
    """

    libraries: str
    ranks: int = 4
    steps: int = 0
    seconds: float = 10.0
    min_occurrences: int = 0
    fault: str = "healthy"
    victim: int = 2
    first_step: int = 20
    groups: str = "ddp"
    synchronize: bool = True
    autograd_thread: bool = True
    host_work_ms: float = 0.5
    loader: bool = False
    answer_port: int = 0
    scratch: str = "/var/tmp"

    def write(self, folder: Path) -> None:
        """Writes the plan into the job's folder."""
        (folder / PLAN_FILE).write_text(json.dumps(asdict(self), indent=1))


def read_plan(folder: Path) -> Plan:
    """The plan in a job's folder."""
    return Plan(**json.loads((folder / PLAN_FILE).read_text()))


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Requests a signal from the kernel for the end of the parent process, whatever the reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
