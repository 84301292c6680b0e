"""What other people's programs do: ranks are bitwise equal, and equal to Keras alone with the
batches of all ranks.
"""

import numpy as np
import pytest

from tests.library import cases, places, programs, published
from tests.ranks import ROOT

PROGRAMS = cases.PROGRAMS | published.PROGRAMS
FIRST = [f"{row}: {next(iter(variants))}" for row, variants in cases.ROWS.items()] + list(
    published.PROGRAMS
)
ALWAYS = [  # a case of each mechanism; GANs and distillation are in test_fit.py too
    "Keras's optimizers: MultiOptimizer",
    "optimizers of `hi`: hybrid",
    "`use_ema`, `SwapEMAWeights`: swapped",
    "`gradient_accumulation_steps`: XLA, two steps per execution",
    "`run_eagerly=True`, `steps_per_execution`: eager own step",
    "sample weights, class weights, several outputs: sample weights",
    "embeddings: SGD",
    "`BatchNormalization(synchronized=True)`: images and vectors",
    "mixed precision: own step, float16",
    "validation, partial batches: other parts",
    "training loop",
]
ON_FOUR = "`jit_compile`: own step"


def check(program, rows, alone):
    """Returns the largest difference of a weight."""
    for row in rows:
        assert row == rows[0]  # weights, state, history
    found = rows[0]
    assert found["updates"] == alone["updates"] > 0
    distance = [
        np.max(np.abs(np.subtract(*pair)), initial=0)
        for pair in zip(found["weights"], alone["weights"], strict=True)
    ]
    one_rank_differs = program.differs == cases.ONCE_AN_UPDATE  # other reasons need several
    if program.differs and program.differs != cases.ROUNDED and (len(rows) > 1 or one_rank_differs):
        assert max(distance) > 10 * program.close, "they are equal after all"
        return max(distance)
    assert max(distance) <= program.close
    for name, values in alone["history"].items() if program.logs else ():
        np.testing.assert_allclose(
            found["history"][name],
            values,
            rtol=program.close,
            atol=10 * program.close,
            err_msg=name,
        )
    return max(distance)


def compare(call, name, size, record_property):
    found = call(programs.compared, name)
    assert name not in cases.PROGRAMS or found[0]["reductions"] == (
        found[0]["updates"] if size > 1 else 0
    )
    largest = check(PROGRAMS[name], found, places.alone(PROGRAMS[name], size))
    record_property(
        "largest difference", float(largest)
    )  # --junitxml=FILE keeps it, for docs/keras-compatibility.md


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.slow) for n in PROGRAMS]
)
def test_two_ranks_train_as_one_process_does(pools, record_property, name):
    compare(pools[2].call, name, 2, record_property)


def test_so_do_four_ranks_that_tensorflow_connects(pools, record_property):
    compare(
        lambda *call: pools["tensorflow"].call(*call, "tensorflow"), ON_FOUR, 4, record_property
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("size", [1, 4])
def test_so_do_one_and_four(pools, record_property, size, name):
    call = pools[size].call if size > 1 else lambda function, *words: [function(*words)]
    compare(call, name, size, record_property)


def test_the_documentation_has_a_row_for_each_case_and_says_why_some_differ():
    page = (ROOT / "docs" / "keras-compatibility.md").read_text()
    text = page.partition("| case |")[2].partition("\n\n")[0]
    lines = [line[2:-2].split(" | ") for line in text.splitlines()[2:]]
    rows = {name: (seen, remark) for name, *seen, remark in lines}
    known = cases.ROWS | {name: {name: program} for name, program in published.PROGRAMS.items()}
    assert list(rows) == list(known)
    for name, (seen, remark) in rows.items():
        equal = [
            program.close
            for program in known[name].values()
            if program.differs in ("", cases.ROUNDED)
        ]
        for cell in seen:
            assert cell == "differs" if not equal else cell == "-" or float(cell) <= max(equal), (
                name
            )
        assert all(program.differs in remark for program in known[name].values()), name
