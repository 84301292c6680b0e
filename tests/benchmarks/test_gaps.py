"""Tests the gaps between kernels on a synthetic profile."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks import gaps


def add_plane(space, name, lines):
    """Adds a plane to a profile; lines have events of (begin, end in milliseconds, name)."""
    new_plane = space.planes.add(name=name)
    for line_name, events in lines.items():
        line = new_plane.lines.add(name=line_name, timestamp_ns=5_000_000)
        for begin, end, event_name in events:
            number = len(new_plane.event_metadata) + 1
            new_plane.event_metadata[number].name = event_name
            offset = round((begin - 5) * 1e9)
            line.events.add(
                metadata_id=number, offset_ps=offset, duration_ps=round((end - begin) * 1e9)
            )


CALLS = {
    "python": [(10, 11, "call of a step"), (11, 19, "call of a step")],
    "tf_Compute": [(10, 30, "host")],
}
STREAMS = {
    "Stream #7(Compute)": [(2, 4, "early"), (12, 14, "a"), (14, 15, "b"), (18, 20, "c")],
    "Stream #8(MemcpyD2H)": [(14.5, 16, "copy")],
    "Steps": [(0, 40, "not a kernel")],
}


def test_gaps_are_measured_between_kernels_of_all_streams_after_the_first_call():
    space = xplane_pb2.XSpace()
    add_plane(space, "/host:CPU", CALLS)
    add_plane(space, "/device:GPU:0", STREAMS)
    result = gaps.gaps(space)
    assert (result["device"], result["kernels"]) == ("gpu", 4)
    assert result["calls"] == [pytest.approx((0, 1)), pytest.approx((1, 9))]
    (gap,) = result["gaps"]
    assert (gap["start"], gap["length"]) == pytest.approx((6, 2))
    assert (gap["before"], gap["after"]) == ("copy", "c")
    assert result["busy"] == pytest.approx(1 - 2 / 8)
    assert "6.00  idle   2.000  copy -> c" in gaps.text(result)


def test_gaps_without_a_gpu_are_measured_on_threads_of_the_cpu():
    space = xplane_pb2.XSpace()
    add_plane(space, "/host:CPU", CALLS)
    assert (gaps.gaps(space)["device"], gaps.gaps(space)["busy"]) == ("cpu", 1)
