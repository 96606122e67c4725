"""The kernels of a process in a window (`stallscope look`) as a timeline: a track for each GPU and stream.

The kernels of NCCL have a track of their own for each GPU. Perfetto aligns the timeline with an exported trace of the
same time by the wall clock.
"""

from collections.abc import Sequence

import numpy as np

from stallscope.diagnose.views import OTHER_KERNELS, is_nccl_kernel
from stallscope.events.layout import Array
from stallscope.exporters.track_layout import track_rows
from stallscope.exporters.tracks import Slice, Track, TrackSet


def kernel_tracks(
    kernels: Array, names: Sequence[str], *, node: str, process: str, begin_ns: int, wall_ns: int
) -> TrackSet:
    """The timeline. kernels: fields start_ns, end_ns, name (a number in `names`), stream, device; on CUPTI's clock.

    process: the rank and the program. begin_ns: a moment of CUPTI's clock; wall_ns: the wall time at that moment.
    """
    whole = f"{node} {process}"
    tracks = [Track(1, 0, node, node), Track(2, 1, process, whole)]
    labels = [*names, OTHER_KERNELS]
    number = np.minimum(kernels["name"].astype(np.int64), len(names))
    is_nccl = np.array([is_nccl_kernel(name) for name in labels], bool)[number]
    for device in np.unique(kernels["device"]).tolist():
        own = kernels["device"] == device
        parts = [
            (f"GPU {device}, stream {stream}", own & ~is_nccl & (kernels["stream"] == stream))
            for stream in np.unique(kernels["stream"][own & ~is_nccl]).tolist()
        ]
        for title, rows in (*parts, (f"GPU {device}: kernels of NCCL", own & is_nccl)):
            for line, slices in enumerate(track_rows(_slices(kernels[rows], number[rows], labels))):
                name = title if not line else f"{title} ({line + 1})"
                tracks.append(Track(len(tracks) + 1, 2, name, whole, slices=slices))
    return TrackSet(tracks, begin_ns, wall_ns)


def _slices(rows: Array, number: Array, labels: Sequence[str]) -> list[Slice]:
    columns = (rows[name].tolist() for name in ("start_ns", "end_ns", "stream"))
    return [
        Slice(start, max(end - start, 0), labels[name], {"stream": stream})
        for start, end, stream, name in zip(*columns, number.tolist(), strict=True)
    ]
