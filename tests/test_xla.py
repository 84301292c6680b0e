"""Tests of `hybrid_imagenet.xla`."""

import logging

import pytest
import tensorflow as tf

from hybrid_imagenet import xla


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [f"{kind}:0"])
    monkeypatch.delenv("HYBRID_IMAGENET_XLA", raising=False)
    probes = (xla._compiles_functions_on_gpu, xla._compiles_convolutions_on_gpu)
    for probe in probes:
        probe.cache_clear()
    yield monkeypatch
    for probe in probes:
        probe.cache_clear()


def double(x):
    return 2 * x


def is_compiled(function, shape=(3,)):
    step = tf.function(lambda x: function(x)).get_concrete_function(tf.TensorSpec(shape))
    calls = [each for each in step.graph.get_operations() if "PartitionedCall" in each.type]
    return any(call.get_attr("_XlaMustCompile") for call in calls)


def test_compile_on_gpu_without_a_gpu_does_not_compile(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [])
    assert not is_compiled(xla.compile_on_gpu(double))
    assert xla.supported()


def test_compile_on_gpu_compiles_static_shapes_only(gpu):
    function = xla.compile_on_gpu(double)
    assert is_compiled(function)
    assert not is_compiled(function, (None,))
    assert float(function(tf.constant(2.0))) == 4.0


def test_compile_on_gpu_with_xla_turned_off_does_not_compile(gpu):
    gpu.setenv("HYBRID_IMAGENET_XLA", "0")
    assert not is_compiled(xla.compile_on_gpu(double))


def test_supported_on_a_gpu_without_xla_tries_once_and_warns(gpu, caplog):
    attempts = []
    function = xla.compile_on_gpu(double)

    def fails(function, **settings):
        def call(*arguments):
            attempts.append(settings)
            raise tf.errors.InvalidArgumentError(None, None, "no kernel image\nfor sm_61")

        return call

    gpu.setattr(xla.tf, "function", fails)
    with caplog.at_level(logging.WARNING):
        assert float(function(tf.constant(2.0))) == 4.0
        assert not xla.supported()
    assert attempts == [{"autograph": False, "jit_compile": True}]
    (record,) = caplog.records
    assert (
        "does not compile" in record.message
        and "no kernel image" in record.message
        and "sm_61" not in record.message
    )


def failing_for(operation, error):
    """Returns a tf.function that raises an error if it is to compile an operation."""

    def function(python_function, **settings):
        def call(*arguments):
            graph = tf.Graph()
            with graph.as_default():
                specs = [tf.compat.v1.placeholder(a.dtype, a.shape) for a in arguments]
                python_function(*specs)
            if any(each.type == operation for each in graph.get_operations()):
                raise error
            return tf.constant(1.0)

        return call

    return function


@pytest.mark.parametrize("operation", ["Exp", "Pow", "Rsqrt"])
def test_supported_on_a_gpu_without_libdevice_is_false(operation, gpu):
    error = tf.errors.InternalError(None, None, "libdevice not found at ./libdevice.10.bc")
    gpu.setattr(xla.tf, "function", failing_for(operation, error))
    assert not xla.supported()
    assert not xla.supports_step()


@pytest.mark.parametrize("operation", ["Conv2D", "Conv2DBackpropFilter", "MatMul"])
def test_supports_step_without_kernels_for_convolutions_is_false(operation, gpu, caplog):
    error = tf.errors.UnimplementedError(None, None, "Autotuning failed\nfor HLO: custom-call")
    gpu.setattr(xla.tf, "function", failing_for(operation, error))
    assert xla.supported()
    with caplog.at_level(logging.WARNING):
        assert not xla.supports_step()
        assert not xla.supports_step()
    (record,) = caplog.records
    assert "XLA does not compile convolutions for this GPU" in record.message
    assert "(Autotuning failed)" in record.message


def test_supports_step_with_a_program_that_returns_another_value_is_false(gpu, caplog):
    gpu.setattr(xla.tf, "function", lambda function, **settings: lambda *values: tf.constant(2.0))
    with caplog.at_level(logging.WARNING):
        assert not xla.supports_step()
    assert "a test program returned 2 instead of 1" in caplog.records[0].message


def test_supports_step_where_xla_works_is_true(gpu):
    # XLA compiles the programs for this machine's processor.
    assert xla.supports_step()
