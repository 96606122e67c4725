"""System calls and the object that a blocked thread waits for; numbers from the kernel's header, if present."""

import re
from pathlib import Path

import numpy as np
import pytest

from stallscope.events.names import Category
from stallscope.events.syscalls import USER_MODE, blocked_category

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
WAITS_FOR = {
    Category.LOCK: ["futex", "futex_waitv"],
    Category.SLEEP: ["nanosleep", "clock_nanosleep"],
    Category.DRIVER: ["ioctl"],
    Category.NET: [
        "poll",
        "ppoll",
        "select",
        "pselect6",
        "epoll_wait",
        "epoll_pwait",
        "recvmsg",
        "sendto",
        "accept4",
    ],
    Category.IO: [
        "pread64",
        "pwrite64",
        "fsync",
        "fdatasync",
        "io_getevents",
        "openat",
        "getdents64",
        "fallocate",
    ],
    Category.FAULT: ["mmap", "munmap", "madvise", "mremap", "mprotect"],
    Category.OTHER_OFF: ["wait4", "pause", "rt_sigtimedwait"],
}


@pytest.fixture(scope="module")
def numbers():
    if not HEADER.is_file():
        pytest.skip(f"no {HEADER} to take the numbers from")
    return {name: int(nr) for name, nr in re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text())}


def category(nr, is_interruptible=True):
    return Category(int(blocked_category(np.array([nr]), is_interruptible=np.array([is_interruptible]))[0]))


@pytest.mark.parametrize("wanted", WAITS_FOR, ids=lambda category: category.name.lower())
def test_each_blocking_system_call_has_its_category(numbers, wanted):
    assert {name: category(numbers[name]) for name in WAITS_FOR[wanted]} == dict.fromkeys(
        WAITS_FOR[wanted], wanted
    )


def test_an_interruptible_read_or_write_is_a_network_wait(numbers):
    for name in ("read", "write", "readv", "writev"):
        assert category(numbers[name], is_interruptible=True) == Category.NET
        assert category(numbers[name], is_interruptible=False) == Category.IO


def test_a_block_outside_system_calls_is_a_page_fault():
    assert category(USER_MODE) == Category.FAULT


@pytest.mark.parametrize("nr", [-2, 511, 512, 10**6])
def test_numbers_outside_the_table_are_not_guessed(nr):
    assert category(nr) == Category.OTHER_OFF
