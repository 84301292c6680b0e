"""What other people's programs do: ranks are bitwise equal, and equal to Keras alone with the batches of all ranks."""

import numpy as np
import pytest

from tests.library import cases, places, programs, published
from tests.ranks import ROOT

PROGRAMS = cases.PROGRAMS | published.PROGRAMS
NAMES = {row: [f"{row}: {name}" for name in variants] for row, variants in cases.ROWS.items()} | {
    name: [name] for name in published.PROGRAMS
}  # by row of docs/library.md
ALWAYS = [
    "Keras's optimizers: AdamW", "Keras's optimizers: MultiOptimizer", "optimizers of `hi`: hybrid",
    "`use_ema`, `SwapEMAWeights`: swapped", "`gradient_accumulation_steps`: XLA, two steps per execution",
    "`run_eagerly=True`: own step",
    "several outputs: weighted", "sample weights, class weights: sample weights", "embeddings: SGD",
    "mixed precision: own step, float16", "`PyDataset`: plain", "partial batches: other ones",
    "GAN with gradient penalty", "variational autoencoder", "distillation", "training loop", "text classification",
]  # fmt: skip
ON_FOUR = ["GAN", "`jit_compile`: own step", "`tf.data`: weighted"]


def check(program, rows, alone):
    for row in rows:
        assert row == rows[0]  # weights, state, history
    found = rows[0]
    assert found["updates"] == alone["updates"] > 0
    distance = [
        np.max(np.abs(np.subtract(*pair)), initial=0) for pair in zip(found["weights"], alone["weights"], strict=True)
    ]
    if program.differs and program.differs != cases.ROUNDED:
        assert max(distance) > 10 * program.close, "they are equal after all"
        return
    assert max(distance) <= program.close
    for name, values in alone["history"].items() if program.logs else ():
        np.testing.assert_allclose(
            found["history"][name], values, rtol=program.close, atol=10 * program.close, err_msg=name
        )


def compare(call, names, size):
    by_rank = call(programs.compared, names)
    for number, name in enumerate(names):
        try:
            found = by_rank[0][number]
            assert name not in cases.PROGRAMS or found["reductions"] == (found["updates"] if size > 1 else None)
            check(PROGRAMS[name], [rows[number] for rows in by_rank], places.alone(PROGRAMS[name], size))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_ranks_train_as_one_process_does(pools):
    compare(pools[2].call, ALWAYS, 2)


def test_so_do_four_ranks_that_tensorflow_connects(pools):
    compare(lambda *call: pools["tensorflow"].call(*call, "tensorflow"), ON_FOUR, 4)


@pytest.mark.slow
@pytest.mark.parametrize("row", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_so_does_every_program(pools, size, row):
    call = pools[size].call if size > 1 else lambda function, *words: [function(*words)]
    compare(call, NAMES[row] if size == 2 else NAMES[row][:1], size)


def test_the_documentation_has_a_row_for_each_case_and_says_why_some_differ():
    text = (ROOT / "docs" / "library.md").read_text().partition("| case |")[2].partition("\n\n")[0]
    lines = [line[2:-2].split(" | ") for line in text.splitlines()[2:]]
    rows = {name: (seen, remark) for name, *seen, remark in lines}
    known = cases.ROWS | {name: {name: program} for name, program in published.PROGRAMS.items()}
    assert list(rows) == list(known)
    for name, (seen, remark) in rows.items():
        equal = [program.close for program in known[name].values() if program.differs in ("", cases.ROUNDED)]
        for cell in seen:
            assert cell == "differs" if not equal else cell == "-" or float(cell) <= max(equal), name
        assert all(program.differs in remark for program in known[name].values()), name
