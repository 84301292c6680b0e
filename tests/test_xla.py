"""Tests of `hybrid_imagenet.xla`."""

import logging

import pytest
import tensorflow as tf

from hybrid_imagenet import xla


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [f"{kind}:0"])
    monkeypatch.delenv("HYBRID_IMAGENET_XLA", raising=False)
    xla._runs_on_gpu.cache_clear()
    yield monkeypatch
    xla._runs_on_gpu.cache_clear()


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
