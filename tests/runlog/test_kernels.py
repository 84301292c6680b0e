"""What a GPU did in a step, from recorded profiles that are made here."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from hybrid_imagenet.runlog import kernels, profile
from hybrid_imagenet.runlog.profile import Event
from tests.support.profiles import Plane

CONV = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1"
OLD_CONV = "cudnn::cnn::implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1>"
NHWC = "cudnn::batchnorm_fwtr_nhwc_semiPersist<__half, 1, 1, 1, 64>"
NCHW = "cudnn::bn_fw_tr_1C11_kernel_NCHW<__half2, float, 512, true, 1>"


def recorded(*events, steps=((0, 50), (50, 100))):
    """The device of a profile with these events (line, name, start, end, operation) on GPU 0, in milliseconds."""
    space = xplane_pb2.XSpace()
    host, gpu = Plane(space, "/host:CPU"), Plane(space, "/device:GPU:0 (A100)")
    for start, end in steps:
        host.add("python", "train", start, end)
    for line, name, start, end, operation in events:
        gpu.add(line, name, start, end, **({"tf_op": operation} if operation else {}))
    return kernels.device(list(profile.events(space)))


def test_kernels_are_summed_by_kind_over_the_steps():
    found = recorded(
        ("Stream #14(Compute)", CONV, 0, 20, "resnet50/conv/Conv2D:Conv2D"),
        ("Stream #14(Compute)", CONV, 50, 60, "resnet50/conv/Conv2D:Conv2D"),
        ("Stream #14(Compute)", NHWC, 20, 30, "resnet50/bn/FusedBatchNormV3:FusedBatchNormV3"),
        ("Stream #15(Compute)", "ncclDevKernel_AllReduce_Sum_f16_RING_LL", 25, 40, ""),
        ("Stream #14(Compute)", "input_multiply_reduce_fusion", 60, 62, "optimizer_update/cond/x:PartitionedCall"),
        ("Stream #16(MemcpyD2H)", "MemcpyD2H", 62, 63, ""),
        ("TensorFlow Ops", "resnet50/conv/Conv2D", 0, 50, "resnet50/conv/Conv2D:Conv2D"),  # the same once more
        ("Stream #14(Compute)", CONV, 100, 130, "resnet50/conv/Conv2D:Conv2D"),  # after the steps
    )
    sums = found.by_kind()
    assert list(sums) == list(kernels.KINDS)
    assert sums == pytest.approx(
        {"convolution": 15, "normalization": 5, "communication": 7.5, "update": 1, "host copies": 0.5}
        | dict.fromkeys(("ReLU, sums, pooling", "change of layout", "other"), 0)
    )
    assert (found.step, found.busy, found.computing) == pytest.approx((50, (40 + 13) / 2, (30 + 12) / 2))
    assert found.launches == pytest.approx(3)
    assert (found.kernels[0].name, found.kernels[0].launches) == (CONV, 1)
    assert (found.layout, found.tensor_cores) == ("NHWC", 1)


def test_normalization_in_nchw_is_told_and_its_transpositions_are_its_own_kind():
    operation = "resnet50/bn/FusedBatchNormV3:FusedBatchNormV3"
    found = recorded(
        ("Stream #1", "void cudnn::ops::nhwcToNchwKernel<__half, __half, float>", 0, 10, operation),
        ("Stream #1", "void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<uint2>", 10, 15, operation),
        ("Stream #1", NCHW, 15, 25, operation),
        ("Stream #1", OLD_CONV, 25, 35, "net/Conv2D:Conv2D"),
        ("Stream #1", "volta_fp16_s884cudnn_fp16_128x64_ldg8_dgrad_f2f", 35, 65, "net/x:Conv2DBackpropInput"),
        steps=((0, 100),),
    )
    assert (found.layout, found.by_kind()["change of layout"]) == ("NCHW", 15)
    assert found.tensor_cores == pytest.approx(0.75)


def test_kernels_of_cublas_for_hopper_count_as_tensor_cores():
    found = recorded(
        ("Stream #1", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", 0, 60, "net/x:Conv2D"),
        ("Stream #1", OLD_CONV, 60, 80, "net/Conv2D:Conv2D"),
        steps=((0, 100),),
    )
    assert found.tensor_cores == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "operation", "kind"),
    [
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_nn", "logits/MatMul:MatMul", "convolution"),
        ("anything", "gradient_tape/a/Conv2DBackpropFilter:Conv2DBackpropFilter", "convolution"),
        ("Eigen::internal::EigenMetaKernel<...>", "net/relu/Relu:Relu", "ReLU, sums, pooling"),
        ("anything", "net/bn:_FusedBatchNormEx", "normalization"),
        ("loop_add_fusion", "StatefulPartitionedCall/optimizer_update/cond:If", "update"),
        ("ncclKernel_AllReduce_RING_LL_Sum_half", "", "communication"),
        ("MemcpyH2D", "", "host copies"),
        ("MemcpyD2D", "", "other"),
        ("Eigen::internal::EigenMetaKernel<...>", "Cast:Cast", "other"),
    ],
)
def test_a_kernel_is_sorted_by_its_name_and_its_operation(name, operation, kind):
    assert kernels.kind_of(Event("/device:GPU:0", "Stream #1", name, 0, 1, {"tf_op": operation})) == kind


def test_a_profile_of_a_processor_holds_no_device_and_one_without_steps_is_refused():
    assert recorded() is None
    with pytest.raises(ValueError, match="no step"):
        recorded(steps=())


def test_copies_to_the_host_are_counted_and_the_longest_gaps_listed():
    """A copy is short; what it costs is the gap behind it."""
    found = recorded(
        ("Stream #1", CONV, 0, 20, ""),
        ("Stream #2", "ncclDevKernel_AllReduce", 5, 30, ""),  # covers what would be a gap of the other stream
        ("Stream #1", NHWC, 31, 40, ""),
        ("Stream #3", "MemcpyD2H", 40, 40.5, ""),
        ("Stream #1", CONV, 48.5, 60, ""),
        ("Stream #3", "MemcpyH2D", 60, 61, ""),
    )
    assert found.fetches == pytest.approx(0.5)
    assert [(gap.before, gap.after) for gap in found.gaps] == [("MemcpyD2H", CONV), ("ncclDevKernel_AllReduce", NHWC)]
    assert [gap.milliseconds for gap in found.gaps] == pytest.approx([8, 1])
