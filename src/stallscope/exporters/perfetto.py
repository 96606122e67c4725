"""A timeline as a Perfetto trace, which ui.perfetto.dev and trace_processor open.

Tracks are nested as in the timeline: node, process, thread. They are plain tracks and not Perfetto's processes,
since two nodes may use the same process number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stallscope.errors import BadInput, remedy_for_extra
from stallscope.exporters.tracks import Slice, Track, TrackSet, Value

_SEQUENCE = 1  # a single writer, so that each name is written once
_MONOTONIC, _REALTIME = 3, 1  # BuiltinClock in perfetto/protos/common/builtin_clock.proto


def perfetto_bytes(track_set: TrackSet) -> Iterator[bytes]:
    """The file, packet by packet; equal timelines give equal bytes. Raises BadInput without the perfetto package."""
    protos = _protos()
    writer = _Writer(protos)
    yield writer.framed(writer.first(track_set))
    for order, track in enumerate(track_set.tracks):
        yield writer.framed(writer.descriptor(track, order))
    for track in track_set.tracks:
        for packet in writer.events(track):
            yield writer.framed(packet)


def _protos() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError:
        raise BadInput(
            f"a Perfetto trace needs the perfetto package: {remedy_for_extra('export')}, or choose --format chrome"
        ) from None
    return perfetto_trace_pb2


@dataclass
class _Writer:
    """Makes packets. name_ids, argument_ids: the ids of words that earlier packets have defined."""

    protos: Any
    name_ids: dict[str, int] = field(default_factory=dict)
    argument_ids: dict[str, int] = field(default_factory=dict)

    def framed(self, packet: Any) -> bytes:
        """The packet as an entry of a Trace message: the concatenated entries of all packets are the file."""
        return bytes(self.protos.Trace(packet=[packet]).SerializeToString(deterministic=True))

    def first(self, track_set: TrackSet) -> Any:
        """The clock of all times, and the start of the interned names."""
        packet = self._packet()
        packet.sequence_flags = self.protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.first_packet_on_sequence = True
        packet.trace_packet_defaults.timestamp_clock_id = _MONOTONIC
        snapshot = packet.clock_snapshot
        snapshot.primary_trace_clock = _MONOTONIC
        snapshot.clocks.add(clock_id=_MONOTONIC, timestamp=track_set.clock_ns)
        if track_set.wall_ns is not None:
            snapshot.clocks.add(clock_id=_REALTIME, timestamp=track_set.wall_ns)
        return packet

    def descriptor(self, track: Track, order: int) -> Any:
        """A track: its parent, its name, and its position among its siblings."""
        packet = self._packet()
        description = packet.track_descriptor
        description.uuid, description.name = track.number, track.name
        if track.parent:
            description.parent_uuid = track.parent
        description.child_ordering = self.protos.TrackDescriptor.EXPLICIT
        description.sibling_order_rank = order
        if track.samples:
            description.counter.unit_name = track.unit
        return packet

    def events(self, track: Track) -> Iterator[Any]:
        """The slices and samples of a track, in order of time."""
        kinds = self.protos.TrackEvent
        ends: list[int] = []
        for item in track.slices:
            while ends and ends[-1] <= item.ts_ns:
                yield self._event(kinds.TYPE_SLICE_END, ends.pop(), track)
            if item.duration_ns:
                yield self._begin(kinds.TYPE_SLICE_BEGIN, item, track)
                ends.append(item.ts_ns + item.duration_ns)
            else:
                yield self._begin(kinds.TYPE_INSTANT, item, track)
        while ends:
            yield self._event(kinds.TYPE_SLICE_END, ends.pop(), track)
        for ts_ns, value in track.samples:
            packet = self._event(kinds.TYPE_COUNTER, ts_ns, track)
            packet.track_event.double_counter_value = value
            yield packet

    def _begin(self, kind: int, item: Slice, track: Track) -> Any:
        packet = self._event(kind, item.ts_ns, track)
        event = packet.track_event
        event.name_iid = self._number(self.name_ids, item.name, packet, "event_names")
        event.flow_ids.extend(item.starts)
        event.terminating_flow_ids.extend(item.ends)
        self._add_arguments(event, packet, item.arguments)
        return packet

    def _add_arguments(self, event: Any, packet: Any, arguments: Mapping[str, Value]) -> None:
        for name, value in arguments.items():
            iid = self._number(self.argument_ids, name, packet, "debug_annotation_names")
            event.debug_annotations.add(name_iid=iid, **{_FIELDS[type(value)]: value})

    def _number(self, known: dict[str, int], word: str, packet: Any, table_name: str) -> int:
        """The id of a word; the first packet that uses the word defines it."""
        if word not in known:
            known[word] = len(known) + 1
            getattr(packet.interned_data, table_name).add(iid=known[word], name=word)
        return known[word]

    def _event(self, kind: int, ts_ns: int, track: Track) -> Any:
        packet = self._packet()
        packet.sequence_flags = self.protos.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.timestamp = max(ts_ns, 0)
        packet.track_event.type = kind
        packet.track_event.track_uuid = track.number
        return packet

    def _packet(self) -> Any:
        return self.protos.TracePacket(trusted_packet_sequence_id=_SEQUENCE)


_FIELDS = {str: "string_value", int: "int_value", float: "double_value", bool: "bool_value"}
