"""Which GPU a process's device number stands for."""

import pytest

from stallscope.capture.visible import Gpu, Seen, physical

A = [Gpu(i, f"GPU-{letter * 8}-1", "H100") for i, letter in enumerate("abcd")]
MIG = [Gpu(0, "GPU-aaaa", "A100", ("MIG-1111", "MIG-1222")), Gpu(1, "GPU-bbbb", "A100")]


def indices(variables: dict[str, str], gpus: list[Gpu] = A, **how: bool) -> list[int]:
    """What the device numbers from 0 on stand for."""
    seen = (physical(ordinal, variables, gpus, **how) for ordinal in range(len(gpus)))
    return [one.index for one in seen if one]


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        (None, [0, 1, 2, 3]),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 1 , 0", [1, 0]),
        ("1,9,0", [1]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-cccccccc-1,GPU-a", [2, 0]),
        ("GPU-", []),
        ("GPU-x", []),
        ("0,GPU-d", [0, 3]),
    ],
)
def test_the_list_of_visible_gpus_is_followed_as_cuda_does(visible: str | None, wanted: list[int]):
    assert indices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == wanted


def test_a_part_of_a_gpu_is_told_by_its_own_uuid():
    assert physical(0, {"CUDA_VISIBLE_DEVICES": "MIG-12"}, MIG) == Seen(0, "MIG-1222")
    assert physical(0, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, MIG) is None
    assert physical(0, {}, MIG) == Seen(1, "GPU-bbbb")
    assert physical(0, {}, MIG[:1]) == Seen(0, "MIG-1111")


def test_a_container_counts_the_gpus_it_was_given():
    given = {"NVIDIA_VISIBLE_DEVICES": "GPU-cccccccc-1,1"}
    assert indices(given, is_contained=True) == [1, 2]
    assert indices(given | {"CUDA_VISIBLE_DEVICES": "1"}, is_contained=True) == [2]
    assert indices(given) == [0, 1, 2, 3]
    assert indices({"NVIDIA_VISIBLE_DEVICES": "all"}, is_contained=True) == [0, 1, 2, 3]
    assert indices({"NVIDIA_VISIBLE_DEVICES": "none"}, is_contained=True) == []


def test_between_unlike_gpus_a_number_means_nothing_without_an_order():
    mixed = [Gpu(0, "GPU-a", "A100"), Gpu(1, "GPU-b", "H100")]
    assert indices({}, mixed) == []
    assert indices({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, mixed) == [0, 1]
    assert indices({"CUDA_VISIBLE_DEVICES": "GPU-b"}, mixed) == [1]


@pytest.mark.parametrize("ordinal", [-1, 4])
def test_a_number_that_is_none_of_its_gpus_is_unknown(ordinal: int):
    assert physical(ordinal, {}, A) is None
