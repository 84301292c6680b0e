import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import optimizer as benchmark


def test_bench_optimizer_compares_every_implementation_with_keras():
    shapes = [(3, 3, 2, 4), (4,)]
    grads = [tf.Variable(tf.ones(s), trainable=False) for s in shapes]
    running = benchmark.implementations(grads, [np.ones(s, np.float32) for s in shapes])
    for implementation in running:
        implementation.run()
    report = benchmark.summarize(running, threads=1)
    assert len(report["implementations"]) == 8
    for row in report["implementations"].values():
        ratio = row["milliseconds"] / report["implementations"][benchmark.BASELINE]["milliseconds"]
        assert row["ratio"] == pytest.approx(ratio)
    assert json.loads(json.dumps(report)) == report
