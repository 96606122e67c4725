"""Runs a command under a seccomp profile of a container runtime: seccomp_exec.py PROFILE COMMAND... Needs libseccomp.

Only profiles with one default action and rules without arguments, as deploy/seccomp has; anything else is an error.
"""

import ctypes
import errno
import json
import os
import sys
from pathlib import Path

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def load(profile: Path) -> None:
    """Load the profile into this process. Raises SystemExit if it has other rules, or the kernel refuses it."""
    content = json.loads(profile.read_text())
    if content["defaultAction"] != "SCMP_ACT_ERRNO":
        raise SystemExit(f"setup: {profile}: the default action is {content['defaultAction']}")
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    for rule in content["syscalls"]:
        if rule["action"] != "SCMP_ACT_ALLOW" or rule.get("args"):
            raise SystemExit(f"setup: {profile}: a rule with arguments or another action")
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:  # other architectures have system calls of other names
                library.seccomp_rule_add(context, ctypes.c_uint32(_ALLOW), number, ctypes.c_uint(0))
    if failure := library.seccomp_load(context):
        raise SystemExit(f"setup: {profile}: {os.strerror(-failure)}")


if __name__ == "__main__":
    load(Path(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
