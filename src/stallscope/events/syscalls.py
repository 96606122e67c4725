"""The category of a wait by its system call (x86-64 numbers, arch/x86/entry/syscalls/syscall_64.tbl).

bpf/sched.bpf.c has the same table by name, so it is valid for arm64 as well.
"""

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.names import Category

USER_MODE = -1
"""The system call number of a thread that entered the kernel by an exception or interrupt."""

_BY_NUMBER = {
    Category.LOCK: (202, 449),  # futex, futex_waitv
    Category.SLEEP: (35, 230),  # nanosleep, clock_nanosleep
    Category.DRIVER: (16,),  # ioctl
    # poll, select, pselect6, ppoll, epoll_wait, epoll_pwait, epoll_pwait2
    Category.NET: (
        *(7, 23, 270, 271, 232, 281, 441),
        *(42, 43, 288, 44, 45, 46, 47, 299, 307),  # connect, accept, accept4, send*, recv*
    ),
    # read, write, pread64, pwrite64, readv, writev, preadv, pwritev, preadv2, pwritev2, open, close,
    # openat, fsync, fdatasync, sync, syncfs, sync_file_range, sendfile, splice, copy_file_range, ftruncate,
    # fallocate, rename, unlink, unlinkat, renameat2, io_getevents, io_pgetevents, io_uring_enter,
    # getdents64, stat family
    Category.IO: (
        *(0, 1, 17, 18, 19, 20, 295, 296, 327, 328, 2, 3, 257, 74, 75, 162, 306, 277, 40, 275, 326, 77, 285),
        *(82, 87, 263, 316, 208, 333, 426, 217, 4, 5, 6, 262, 332, 89),
    ),
    Category.FAULT: (9, 10, 11, 28, 25, 26),  # mmap, mprotect, munmap, madvise, mremap, msync
}
_STREAM_CALLS = (0, 1, 19, 20)
"""read, write, readv, writev: on a pipe or socket the wait is interruptible, on a disk it is not."""


def _category_table() -> Array:
    table = np.zeros(512, np.int64)
    for category, numbers in _BY_NUMBER.items():
        table[list(numbers)] = category
    return table


_CATEGORY_BY_NUMBER = _category_table()


def blocked_category(syscall_nr: Array, *, is_interruptible: Array) -> Array:
    """The Category of threads that block in these system calls; OTHER_OFF for calls that are not in the table.

    syscall_nr: int64 (n,), USER_MODE for a thread outside system calls. is_interruptible: bool (n,).
    """
    is_listed = (syscall_nr >= 0) & (syscall_nr < len(_CATEGORY_BY_NUMBER))
    category = np.where(is_listed, _CATEGORY_BY_NUMBER[np.where(is_listed, syscall_nr, 0)], 0)
    category = np.where(np.isin(syscall_nr, _STREAM_CALLS) & is_interruptible, int(Category.NET), category)
    category = np.where(syscall_nr == USER_MODE, int(Category.FAULT), category)
    return np.where(category == 0, int(Category.OTHER_OFF), category)
