"""Programs give equal weights on all ranks, and those of Keras alone with all ranks' batches."""

import numpy as np
import pytest

from tests.library import cases, places, programs, published
from tests.ranks import ROOT

PROGRAMS = cases.PROGRAMS | published.PROGRAMS
FIRST = [f"{row}: {next(iter(variants))}" for row, variants in cases.ROWS.items()] + list(
    published.PROGRAMS
)
# One case of each mechanism runs without --long. GANs and distillation are in test_fit.py too.
ALWAYS = [
    "Keras's optimizers: MultiOptimizer",
    "optimizers of `hi`: hybrid",
    "`use_ema`, `SwapEMAWeights`: swapped",
    "`gradient_accumulation_steps`: XLA, two steps per execution",
    "`run_eagerly=True`, `steps_per_execution`: eager own step",
    "sample weights, class weights, several outputs: sample weights",
    "embeddings: SGD",
    "`BatchNormalization(synchronized=True)`: images and vectors",
    "mixed precision: own step, float16",
    "GAN in FP16 and FP32",
    "targets of 1e4",
    "targets of 1e-8",
    "rare targets 100 times larger",
    "validation, partial batches: other parts",
    "training loop",
]
ON_FOUR = "`jit_compile`: own step"


def check(program, rows, alone):
    """Checks the results of all ranks, and returns the largest difference of a weight."""
    for row in rows:
        # All ranks have the same weights, state and history.
        assert row == rows[0]
    result = rows[0]
    assert result["updates"] == alone["updates"] > 0
    assert result["skipped"] == 0
    distance = [
        np.max(np.abs(np.subtract(*pair)), initial=0)
        for pair in zip(result["weights"], alone["weights"], strict=True)
    ]
    # All other reasons for a difference exist on several ranks only.
    one_rank_differs = program.differs == cases.ONCE_AN_UPDATE
    if program.differs and program.differs != cases.ROUNDED and (len(rows) > 1 or one_rank_differs):
        assert max(distance) > 10 * program.close, "they are equal after all"
        return max(distance)
    assert max(distance) <= program.close
    for name, values in alone["history"].items() if program.logs else ():
        np.testing.assert_allclose(
            result["history"][name],
            values,
            rtol=program.close,
            atol=10 * program.close,
            err_msg=name,
        )
    return max(distance)


def compare(call, name, size, record_property):
    """Compares a program on ranks with the same program in one process."""
    results = call(programs.run_case, name)
    assert name not in cases.PROGRAMS or results[0]["reductions"] == (
        results[0]["updates"] if size > 1 else 0
    )
    largest = check(PROGRAMS[name], results, places.alone(PROGRAMS[name], size))
    # With --junitxml=FILE the number is in FILE, for the table of docs/keras-compatibility.md.
    record_property("largest difference", float(largest))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.slow) for n in PROGRAMS]
)
def test_fit_on_two_ranks_equals_one_process(pools, record_property, name):
    compare(pools[2].call, name, 2, record_property)


@pytest.mark.slow
def test_fit_on_four_ranks_of_tensorflow_equals_one_process(pools, record_property):
    compare(
        lambda *call: pools["tensorflow"].call(*call, "tensorflow"), ON_FOUR, 4, record_property
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("size", [1, 4])
def test_fit_on_one_and_four_ranks_equals_one_process(pools, record_property, size, name):
    call = pools[size].call if size > 1 else lambda function, *words: [function(*words)]
    compare(call, name, size, record_property)


def test_compatibility_page_has_a_row_with_the_reason_for_each_case():
    page = (ROOT / "docs" / "keras-compatibility.md").read_text()
    # The rows are in several tables, one for each kind of case.
    section = page.partition("## Results compared with one process")[2].partition("\n## ")[0]
    table_lines = [line for line in section.splitlines() if line.startswith("| ")]
    lines = [line[2:-2].split(" | ") for line in table_lines if not line.startswith("| case |")]
    rows = {name: (cells, remark) for name, *cells, remark in lines}
    programs_by_row = cases.ROWS | {
        name: {name: program} for name, program in published.PROGRAMS.items()
    }
    assert list(rows) == list(programs_by_row)
    for name, (cells, remark) in rows.items():
        equal = [
            program.close
            for program in programs_by_row[name].values()
            if program.differs in ("", cases.ROUNDED)
        ]
        for cell in cells:
            assert cell == "differs" if not equal else cell == "-" or float(cell) <= max(equal), (
                name
            )
        assert all(program.differs in remark for program in programs_by_row[name].values()), name
