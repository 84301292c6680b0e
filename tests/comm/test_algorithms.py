"""Every algorithm gives the ring's sum: real ranks, many shapes in each start."""

import pytest

from tests.ranks import results

# Sums of small integers are exact in every type, so they must be right to the last bit; the sums of random numbers are
# compared with FP64 within one rounding per rank.
CODE = """
import numpy as np
from hybrid_imagenet import comm
from hybrid_imagenet.comm import Settings
from hybrid_imagenet.comm.environment import configure_tensorflow, placement, prepare
place = placement()
configure_tensorflow(place, prepare(place))
import horovod.tensorflow as hvd
import tensorflow as tf
from hybrid_imagenet.comm.process_sets import ProcessSets
from hybrid_imagenet.comm.algorithms import Masters, Ranks, Ring, SixteenBitExchange, Torus
from hybrid_imagenet.numerics import torus
sets = ProcessSets(place.size)
ranks = Ranks(place.rank, ["here"] * place.size, sets)
found = {"ring": Ring(ranks), "exchange": SixteenBitExchange(place.size)}
for v in [v for v in range(1, place.size + 1) if place.size % v == 0]:
    grid = torus.Grid(v, place.size // v)
    found[f"torus {grid}"] = Torus(ranks, torus_grid=str(grid))
    found[f"masters {grid}"] = Masters(ranks, torus_grid=str(grid))
# rows that are not contiguous, as with ranks dealt out over hosts
if place.size in (4, 6, 8):
    dealt = Ranks(place.rank, [f"h{r % 2}" for r in range(place.size)], sets)
    assert torus.rows(dealt.hosts, dealt.grid(None))[0] == list(range(0, place.size, 2))
    found["torus dealt"] = Torus(dealt)
    found["masters dealt"] = Masters(dealt)
hvd.init(process_sets=sets.made())
c = comm.start(Settings(compression="none"))  # finds Horovod started
lists = [[()], [(1,), (0, 3)], [(3, 5), (), (2,)], [(c.size * 8 + 1,), (5,)], [(1023,), (17, 3), (1,)]]
wrong = []
for name, algorithm in found.items():
    for number, shapes in enumerate(lists):
        dtype = "bfloat16" if name == "exchange" else ("float16", "float32")[(number + len(name)) % 2]
        bits = {"float16": 11, "float32": 24, "bfloat16": 8}[dtype]
        rng = np.random.default_rng([number, 1])
        whole = [[rng.integers(-16, 16, s) for s in shapes] for _ in range(c.size)]
        rough = [[rng.normal(size=s) for s in shapes] for _ in range(c.size)]
        sent = [
            [tf.cast(tf.constant(x, tf.float64), dtype) for x in a + b] for a, b in zip(whole, rough)
        ]
        got = algorithm.sum(sent[c.rank], f"{name}_{number}".replace(" ", "_"))
        for k, tensor in enumerate(got):
            parts = np.stack([np.asarray(rank[k].numpy(), np.float64) for rank in sent])
            exact = k < len(shapes)
            bound = 0.0 if exact else c.size * 2.0**-bits * np.abs(parts).sum(0)
            error = np.abs(np.asarray(tensor.numpy(), np.float64) - parts.sum(0))
            if tensor.shape != (shapes * 2)[k] or tensor.dtype.name != dtype or (error > bound).any():
                wrong.append([name, exact, number, dtype, list(tensor.shape), float(error.max())])
        # all ranks hold the same bits
        bits_here = [np.asarray(t.numpy()).tobytes().hex() for t in got]
        if c.allgather_object(bits_here) != [bits_here] * c.size:
            wrong.append([name, number, dtype, "ranks differ"])
report({"algorithms": sorted(found), "wrong": wrong})
"""


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_all_algorithms_sum_like_the_ring(ranks):
    outcomes = results(ranks, CODE)
    names = outcomes[0]["algorithms"]
    assert {"ring", "exchange", f"torus 1x{ranks}", f"masters {ranks}x1"} <= set(names)
    assert [out["wrong"] for out in outcomes] == [[]] * ranks
