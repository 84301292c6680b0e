"""Times by category from a profile whose events are known."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from hybrid_imagenet.runlog import profile
from tests.support.profiles import Plane


def test_exclusive_times_on_a_processor_add_up_to_the_step():
    space = xplane_pb2.XSpace()
    host = Plane(space, "/host:CPU")
    host.add("python", "train", 100, 150)
    host.add("python", "train", 150, 200)
    host.add("python", "next_batch", 100, 106)  # 2 ms of it alone
    host.add("pool", "net/conv/Conv2D:_MklNativeConv2D", 102, 120)
    host.add("pool 2", "net/conv_2/Conv2D:Conv2D", 110, 130)
    host.asynchronous("gradients_0", "HorovodGroupedAllreduce", 125, 140)  # 10 ms after the last convolution
    host.asynchronous("gradients_0", "HorovodGroupedAllreduce", 155, 165, step=2)
    host.add("pool", "optimizer_update/cond/then/_0/L2Loss:L2Loss", 138, 141)
    host.asynchronous("optimizer_update/cond/StatefulPartitionedCall", "StatefulPartitionedCall", 142, 146)
    host.add("pool", "net/conv/Conv2D:_MklNativeConv2D", 195, 230)  # cut at the end of the last step
    # None of these is an operation of the step.
    host.add("tf_data_private_threadpool", "DecodeJpeg:DecodeJpeg", 100, 200)
    host.add("pool", "ExecutorState::Process", 100, 200)
    host.add("pool", "MemoryAllocation", 100, 200)
    host.add("python", "EagerLocalExecute: __inference_single_1", 100, 200)

    summary = profile.summarize(list(profile.events(space)))
    assert summary["steps"] == 2
    assert summary["step"] == pytest.approx(50)
    total = {"computation": 28 + 5, "optimizer": 3 + 4, "communication": 8 + 10, "input wait": 2}
    for name, milliseconds in total.items():
        assert summary["exclusive"][name] == pytest.approx(milliseconds / 2), name
    assert sum(summary["exclusive"].values()) == pytest.approx(50)
    assert summary["active"]["communication"] == pytest.approx((15 + 10) / 2)
    assert summary["active"]["input wait"] == pytest.approx(3)
    assert summary["operations"]["_MklNativeConv2D"] == pytest.approx((18 + 5) / 2)
    text = profile.table(summary, first=10)
    assert "steps 10 to 11: 50.0 ms per step" in text
    assert all(name in text for name in profile.CATEGORIES)


def test_with_a_device_its_kernels_count_and_not_the_host_that_starts_them():
    space = xplane_pb2.XSpace()
    host, gpu = Plane(space, "/host:CPU"), Plane(space, "/device:GPU:0")
    host.add("python", "train", 0, 100)
    host.add("pool", "net/conv/Conv2D:Conv2D", 0, 90)
    gpu.add("Stream #1", "sm80_xmma_fprop", 10, 40, tf_op="net/conv/Conv2D:Conv2D")
    gpu.add("Stream #1", "multi_tensor", 60, 70, tf_op="optimizer_update/ResourceApplyMomentum:ResourceApplyMomentum")
    gpu.add("Stream #2", "ncclDevKernel_AllReduce_Sum_f16", 30, 55)
    exclusive = profile.summarize(list(profile.events(space)))["exclusive"]
    assert exclusive == pytest.approx(
        {"computation": 30, "optimizer": 10, "communication": 15, "input wait": 0, "host": 45}
    )


def test_a_profile_without_steps_or_without_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no step"):
        profile.summarize([])
    with pytest.raises(FileNotFoundError, match="no profile"):
        profile.read(tmp_path)
