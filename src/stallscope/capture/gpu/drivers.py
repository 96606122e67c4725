"""The GPU driver's devices and its ioctls: majors by the kernel's list, names by the driver's own headers.

Facts: NVIDIA/open-gpu-kernel-modules, 515 to 580. kernel-open/common/inc/nv-chardev-numbers.h: one major (195) for
GPUs, control device and modeset, which differ by the minor; the name in /proc/devices has changed between versions.
Numbers: nv-ioctl-numbers.h, nv-ioctl-numa.h, nv_escape.h, with magic 'F'; nvidia-uvm/uvm_ioctl.h, uvm_linux_ioctl.h,
plain.

An ioctl is a symbol (`ioctl:NV_ESC_RM_CONTROL`). Each driver has IOCTL_NUMBERS symbols; the kernel side maps an unknown
ioctl number to the last symbol of the driver.
"""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

IOCTL_NUMBERS = 256
_OTHER = IOCTL_NUMBERS - 1
_FIRST_UVM_SPECIAL = 240
_MINOR_BITS = 20
_CONTROL, _MODESET, _UVM_TOOLS = 255, 254, 1


class Driver(IntEnum):
    """enum driver: the driver that owns a device."""

    NONE = 0
    NVIDIA = 1
    UVM = 2
    NVSWITCH = 3
    NVLINK = 4
    ANOTHER = 5


_NAMES = {
    Driver.NVIDIA: "nvidia",
    Driver.UVM: "nvidia-uvm",
    Driver.NVSWITCH: "nvidia-nvswitch",
    Driver.NVLINK: "nvidia-nvlink",
    Driver.ANOTHER: "nvidia-another",
}

_REGISTERED = {name: driver for driver, name in _NAMES.items()} | dict.fromkeys(
    ("nvidia-frontend", "nvidiactl", "nvidia-modeset"), Driver.NVIDIA
)
"""Drivers by the names that they register their devices under."""

_RM = {
    0x27: "RM_ALLOC_MEMORY",
    0x28: "RM_ALLOC_OBJECT",
    0x29: "RM_FREE",
    0x2A: "RM_CONTROL",
    0x2B: "RM_ALLOC",
    0x32: "RM_CONFIG_GET",
    0x33: "RM_CONFIG_SET",
    0x34: "RM_DUP_OBJECT",
    0x35: "RM_SHARE",
    0x37: "RM_CONFIG_GET_EX",
    0x38: "RM_CONFIG_SET_EX",
    0x39: "RM_I2C_ACCESS",
    0x41: "RM_IDLE_CHANNELS",
    0x4A: "RM_VID_HEAP_CONTROL",
    0x4D: "RM_ACCESS_REGISTRY",
    0x4E: "RM_MAP_MEMORY",
    0x4F: "RM_UNMAP_MEMORY",
    0x52: "RM_GET_EVENT_DATA",
    0x54: "RM_ALLOC_CONTEXT_DMA2",
    0x56: "RM_ADD_VBLANK_CALLBACK",
    0x57: "RM_MAP_MEMORY_DMA",
    0x58: "RM_UNMAP_MEMORY_DMA",
    0x59: "RM_BIND_CONTEXT_DMA",
    0x5C: "RM_EXPORT_OBJECT_TO_FD",
    0x5D: "RM_IMPORT_OBJECT_FROM_FD",
    0x5E: "RM_UPDATE_DEVICE_MAPPING_INFO",
    200: "CARD_INFO",
    201: "REGISTER_FD",
    206: "ALLOC_OS_EVENT",
    207: "FREE_OS_EVENT",
    209: "STATUS_CODE",
    210: "CHECK_VERSION_STR",
    211: "IOCTL_XFER_CMD",
    212: "ATTACH_GPUS_TO_FD",
    213: "QUERY_DEVICE_INTR",
    214: "SYS_PARAMS",
    215: "NUMA_INFO",
    216: "SET_NUMA_STATUS",
    217: "EXPORT_TO_DMABUF_FD",
    218: "WAIT_OPEN_COMPLETE",
}

_UVM = {
    1: "RESERVE_VA",
    2: "RELEASE_VA",
    3: "REGION_COMMIT",
    4: "REGION_DECOMMIT",
    5: "REGION_SET_STREAM",
    6: "SET_STREAM_RUNNING",
    7: "SET_STREAM_STOPPED",
    9: "RUN_TEST",
    10: "ADD_SESSION",
    11: "REMOVE_SESSION",
    12: "ENABLE_COUNTERS",
    13: "MAP_COUNTER",
    14: "CREATE_EVENT_QUEUE",
    15: "REMOVE_EVENT_QUEUE",
    16: "MAP_EVENT_QUEUE",
    17: "EVENT_CTRL",
    18: "REGISTER_MPS_SERVER",
    19: "REGISTER_MPS_CLIENT",
    20: "GET_GPU_UUID_TABLE",
    23: "CREATE_RANGE_GROUP",
    24: "DESTROY_RANGE_GROUP",
    25: "REGISTER_GPU_VASPACE",
    26: "UNREGISTER_GPU_VASPACE",
    27: "REGISTER_CHANNEL",
    28: "UNREGISTER_CHANNEL",
    29: "ENABLE_PEER_ACCESS",
    30: "DISABLE_PEER_ACCESS",
    31: "SET_RANGE_GROUP",
    33: "MAP_EXTERNAL_ALLOCATION",
    34: "FREE",
    35: "MEM_MAP",
    36: "DEBUG_ACCESS_MEMORY",
    37: "REGISTER_GPU",
    38: "UNREGISTER_GPU",
    39: "PAGEABLE_MEM_ACCESS",
    40: "PREVENT_MIGRATION_RANGE_GROUPS",
    41: "ALLOW_MIGRATION_RANGE_GROUPS",
    42: "SET_PREFERRED_LOCATION",
    43: "UNSET_PREFERRED_LOCATION",
    44: "ENABLE_READ_DUPLICATION",
    45: "DISABLE_READ_DUPLICATION",
    46: "SET_ACCESSED_BY",
    47: "UNSET_ACCESSED_BY",
    51: "MIGRATE",
    53: "MIGRATE_RANGE_GROUP",
    54: "ENABLE_SYSTEM_WIDE_ATOMICS",
    55: "DISABLE_SYSTEM_WIDE_ATOMICS",
    56: "TOOLS_INIT_EVENT_TRACKER",
    57: "TOOLS_SET_NOTIFICATION_THRESHOLD",
    58: "TOOLS_EVENT_QUEUE_ENABLE_EVENTS",
    59: "TOOLS_EVENT_QUEUE_DISABLE_EVENTS",
    60: "TOOLS_ENABLE_COUNTERS",
    61: "TOOLS_DISABLE_COUNTERS",
    62: "TOOLS_READ_PROCESS_MEMORY",
    63: "TOOLS_WRITE_PROCESS_MEMORY",
    64: "TOOLS_GET_PROCESSOR_UUID_TABLE",
    65: "MAP_DYNAMIC_PARALLELISM_REGION",
    66: "UNMAP_EXTERNAL",
    67: "TOOLS_FLUSH_EVENTS",
    68: "ALLOC_SEMAPHORE_POOL",
    69: "CLEAN_UP_ZOMBIE_RESOURCES",
    70: "PAGEABLE_MEM_ACCESS_ON_GPU",
    71: "POPULATE_PAGEABLE",
    72: "VALIDATE_VA_RANGE",
    73: "CREATE_EXTERNAL_RANGE",
    74: "MAP_EXTERNAL_SPARSE",
    75: "MM_INITIALIZE",
    76: "TOOLS_INIT_EVENT_TRACKER_V2",
    77: "TOOLS_GET_PROCESSOR_UUID_TABLE_V2",
    78: "ALLOC_DEVICE_P2P",
    79: "CLEAR_ALL_ACCESS_COUNTERS",
    _FIRST_UVM_SPECIAL + 1: "INITIALIZE",
    _FIRST_UVM_SPECIAL + 2: "DEINITIALIZE",
}


def majors(proc: Path = Path("/proc")) -> dict[int, Driver]:
    """The driver of each major number that the GPU driver has registered for character devices; empty without one."""
    try:
        text = (proc / "devices").read_text()
    except OSError:
        return {}
    drivers = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and name.startswith("nvidia"):
            drivers[int(number)] = _REGISTERED.get(name, Driver.ANOTHER)
    return drivers


def _symbol(driver: Driver, number: int) -> str:
    if driver is Driver.NVIDIA and number in _RM:
        return f"ioctl:NV_ESC_{_RM[number]}"
    if driver is Driver.UVM and number in _UVM:
        return f"ioctl:UVM_{_UVM[number]}"
    return f"ioctl:{_NAMES[driver]}:{'other' if number == _OTHER else hex(number)}"


SYMBOLS = tuple(_symbol(driver, number) for driver in Driver if driver for number in range(IOCTL_NUMBERS))
"""The name of each ioctl, in the order of the kernel side's symbols."""


def device_name(device: int, drivers: Mapping[int, Driver]) -> str:
    """The customary name of the device file, by its kernel device number. drivers: majors()."""
    major, minor = device >> _MINOR_BITS, device & (1 << _MINOR_BITS) - 1
    driver = drivers.get(major)
    if driver is Driver.NVIDIA:
        return {_CONTROL: "nvidiactl", _MODESET: "nvidia-modeset"}.get(minor, f"nvidia{minor}")
    if driver is Driver.UVM:
        return "nvidia-uvm-tools" if minor == _UVM_TOOLS else "nvidia-uvm"
    return _NAMES[driver] if driver else f"{major}:{minor}"
