import math

import pytest

from hybrid_imagenet.checkpoints import metadata
from tests.checkpoints.support import meta

NETWORK = {
    "model": [5, ""],
    "num_classes": [0, 3, "2"],
    "class_names": [[], "ab", ["a", 1], ["a"]],
    "image_size": [0, 1.5, 10**9],
    "width": [0, "64"],
    "stem": [None, 3],
    "crop_fraction": [0, 1.5, math.nan],
    "batch_norm_epsilon": [-1e-5, math.nan, "1e-5"],
    "pixel_mean": [[0.5], 0.5, [0.1, 0.2, math.inf]],
    "pixel_deviation": [[0.0, 1.0, 1.0], None],
    "stride_in_1x1": ["yes", 1],
    "averaged": ["no", 0],
}


@pytest.mark.parametrize("name", NETWORK)
def test_what_describes_a_network_has_a_form_and_a_range(name):
    metadata.check_network(meta(8))
    for value in NETWORK[name]:
        for check in (metadata.check_network, metadata.check_run):
            with pytest.raises(ValueError, match=f"^({name}|class_names)"):
                check(meta(8) | {name: value})


@pytest.mark.parametrize("state", [None, 3, {}, {"cursor": 5}, meta(8)["state"] | {"rollbacks": 0}])
def test_the_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match=r"^state is not that of a run"):
        metadata.check_run(meta(8) | {"state": state})


@pytest.mark.parametrize("name", ["epoch_sums", "square_norms"])
@pytest.mark.parametrize("rows", [[], {"loss": 1.0}, None])
def test_each_rank_has_its_row(name, rows):
    with pytest.raises(ValueError, match=f"^{name} has no row for each of 1 ranks"):
        metadata.check_run(meta(8) | {name: rows})


@pytest.mark.parametrize("name", ["state", "world_size", "epoch_sums", "square_norms"])
def test_what_a_run_needs_must_be_there(name):
    values = meta(8)
    del values[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        metadata.check_run(values)
    metadata.check_network(values)


def test_a_long_value_is_shortened():
    with pytest.raises(ValueError, match=r"^stem is \['x{38}\.\.\., not the name of a stem$"):
        metadata.check_network(meta(8) | {"stem": ["x" * 10_000]})
