"""Which GPU of the machine a process means by its device number.

A process counts the GPUs that it can see: those its container was given, then those that CUDA_VISIBLE_DEVICES
chooses, in that order (CUDA C++ programming guide, "CUDA environment variables"): numbers, or beginnings of UUIDs;
the first word that names no GPU ends the list; a GPU named twice leaves none.

Numbers mean the order of the PCI bus, as NVML counts. CUDA counts the fastest first unless CUDA_DEVICE_ORDER says
PCI_BUS_ID: on machines with GPUs of several models the number can then be another one, and None is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG), as NVML tells it. model: to tell whether all are alike."""

    index: int
    uuid: str  # GPU-..., or MIG-...
    model: str = ""
    parts: tuple[str, ...] = ()  # UUIDs of its MIG devices


@dataclass(frozen=True)
class Seen:
    """What a device number stands for: the GPU's index, and the UUID of it or of its part."""

    index: int
    uuid: str


def physical(
    ordinal: int, variables: Mapping[str, str], gpus: Sequence[Gpu], *, is_contained: bool = False
) -> Seen | None:
    """The GPU that the process calls `ordinal`; None where it cannot be told.

    variables: the process's environment. gpus: those of the machine, by index. is_contained: it is in a container,
    whose GPUs NVIDIA_VISIBLE_DEVICES tells.
    """
    given = list(gpus)
    if is_contained and (words := variables.get("NVIDIA_VISIBLE_DEVICES", "")) not in ("", "all"):
        named = [_named(word.strip(), given) for word in words.split(",")]
        given = [gpu for gpu in given if gpu.index in {seen.index for seen in named if seen}]
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or any(word.strip().isdecimal() for word in chosen.split(",")):
        is_in_order = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g.model for g in given}) < 2
        if not is_in_order:
            return None
    seen = _all(given) if chosen is None else _chosen(chosen, given)
    return seen[ordinal] if 0 <= ordinal < len(seen) else None


def _all(gpus: Sequence[Gpu]) -> list[Seen]:
    """Of a GPU that is divided a process sees one part only (MIG user guide, "CUDA device enumeration")."""
    divided = [gpu for gpu in gpus if gpu.parts]
    if divided and len(divided) == len(gpus):
        return [Seen(divided[0].index, divided[0].parts[0])]
    return [Seen(gpu.index, gpu.uuid) for gpu in gpus if not gpu.parts]


def _chosen(words: str, gpus: Sequence[Gpu]) -> list[Seen]:
    found: list[Seen] = []
    for word in words.split(","):
        seen = _named(word.strip(), gpus)
        if seen is None:
            break
        if seen in found:
            return []
        found.append(seen)
    return found


def _named(word: str, gpus: Sequence[Gpu]) -> Seen | None:
    """By number among those that are given, or by the beginning of a UUID that only one has."""
    if word.isdecimal():
        number = int(word)
        return Seen(gpus[number].index, gpus[number].uuid) if number < len(gpus) else None
    if word.startswith("MIG-"):
        parts = [Seen(gpu.index, part) for gpu in gpus for part in gpu.parts if part.startswith(word)]
        return parts[0] if len(parts) == 1 else None
    wholes = [
        Seen(gpu.index, gpu.uuid) for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)
    ]
    return wholes[0] if len(wholes) == 1 else None
