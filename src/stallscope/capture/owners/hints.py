"""Facts about a process that are not labels: variables that a source needs, a Ray worker's addresses, its peers."""

import re
from collections.abc import Mapping
from pathlib import Path

from stallscope.capture.owners.peers import group_size
from stallscope.capture.owners.source import HINTS, RAY_JOB
from stallscope.capture.process.process_identity import large_file, small_file

OWN_PID = "own pid"
"""The number of the process in its own PID namespace: a container numbers its processes itself."""
ADDRESSES = "addresses"
"""The IPv4 addresses of its network namespace, separated by commas."""
N_PEERS = "peers"
"""The number of processes of its group, see peers.py."""

_OWN_PID = re.compile(rb"^NSpid:.*\b(\d+)$", re.MULTILINE)
_LOCAL = re.compile(rb"\|-- ([\d.]+)\n\s+/32 host LOCAL")
_MAX_BYTES = 1 << 18


def hints(pid: int, variables: Mapping[str, str], proc: Path = Path("/proc")) -> dict[str, str]:
    """The variables of HINTS; N_PEERS; OWN_PID and ADDRESSES of a worker of Ray."""
    known = {name: variables[name] for name in HINTS if name in variables}
    known[N_PEERS] = str(group_size(variables))
    if RAY_JOB not in variables:
        return known
    number = _OWN_PID.search(small_file(f"{proc}/{pid}/status"))
    routes = large_file(proc / str(pid) / "net" / "fib_trie", _MAX_BYTES)
    addresses = dict.fromkeys(address.decode() for address in _LOCAL.findall(routes))
    return known | {OWN_PID: number[1].decode() if number else str(pid), ADDRESSES: ",".join(addresses)}
