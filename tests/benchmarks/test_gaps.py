"""The gaps between kernels, on a profile that is made here."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from hybrid_imagenet.benchmarks import gaps


def plane(space, name, lines):
    """A plane of a profile; lines have events of (begin, end in milliseconds, name)."""
    made = space.planes.add(name=name)
    for line_name, events in lines.items():
        line = made.lines.add(name=line_name, timestamp_ns=5_000_000)
        for begin, end, what in events:
            number = len(made.event_metadata) + 1
            made.event_metadata[number].name = what
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


def test_gaps_lie_between_the_kernels_of_all_streams_since_the_first_call():
    space = xplane_pb2.XSpace()
    plane(space, "/host:CPU", CALLS)
    plane(space, "/device:GPU:0", STREAMS)
    found = gaps.gaps(space)
    assert (found["device"], found["kernels"]) == ("gpu", 4)
    assert found["calls"] == [pytest.approx((0, 1)), pytest.approx((1, 9))]
    (gap,) = found["gaps"]
    assert (gap["start"], gap["length"]) == pytest.approx((6, 2))
    assert (gap["before"], gap["after"]) == ("copy", "c")
    assert found["busy"] == pytest.approx(1 - 2 / 8)
    assert "6.00  idle   2.000  copy -> c" in gaps.text(found)


def test_without_a_gpu_threads_of_the_cpu_stand_for_streams():
    space = xplane_pb2.XSpace()
    plane(space, "/host:CPU", CALLS)
    assert (gaps.gaps(space)["device"], gaps.gaps(space)["busy"]) == ("cpu", 1)
