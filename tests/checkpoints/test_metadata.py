import copy
import math

import pytest

from hybrid_imagenet.checkpoints import metadata
from hybrid_imagenet.optimizers import base
from tests.checkpoints.support import meta

RUN = {
    "state.cursor.epoch": [-1, 1.0, 10**12, "0", None, 4, True],
    "state.cursor.offset": [-1, 0.5, None],
    "state.cursor": [None, 5, [0, 0], {}, {"epoch": 1}],
    "state.step": [-1, 10**9, 4.0, "many"],
    "state.images": [-1, 0.5, "8"],
    "state.finished_epochs": [-1, 5, 10**12],
    "state.seconds": [-1.0, math.nan, math.inf, "1", None],
    "state.best_top1": [-0.1, 1.5, math.nan, None],
    "state.best_epoch": [-1, "1"],
    "state.closed_at": [-0.5, None, "1"],
    "state.hyper": [None, [], {"learning_rate": 1.0}, {"phase": math.nan}, {"phase": 0, "other": 1.0}],
    "state": [None, 3, []],
    "world_size": [0, 2, 1.0, None],
    "epoch_sums": [None, [], {}, [[1.0, 2.0, 3.0]], [[1.0, math.nan, 0.0, 1.0]], [[None, 0, 0, 0]], [1, 2, 3, 4]],
    "square_norms": [None, [], [[1.0, 2.0]], [[0.0, 0.0, -1.0]]],
    "val_top1": [2.0, "0.5", math.nan],
    "data": [None, [], {"training": 8}],
    "order.seed": [-1, "0", None],
    "order.shuffle_window": [-1, 0.5, None],
    "order": [None, 3, []],
}
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

# Values that do not fit each other are told by one of them.
TOLD_BY = {"state.finished_epochs": "state.cursor.epoch", "world_size": "epoch_sums", "num_classes": "class_names"}


def altered(place, value):
    changed = copy.deepcopy(meta(8, order={"seed": 0, "shuffle_window": 0}, data={"training": {"images": 32}}))
    *above, last = place.split(".")
    inner = changed
    for key in above:
        inner = inner[key]
    inner[last] = value
    return changed


@pytest.mark.parametrize("place", [*RUN, *NETWORK])
def test_every_value_has_a_form_and_a_range(place):
    metadata.check_run(meta(8))
    for value in (RUN | NETWORK)[place]:
        with pytest.raises(ValueError, match=f"^({place}|{TOLD_BY.get(place, place)})"):
            metadata.check_run(altered(place, value))
        if place in NETWORK:
            with pytest.raises(ValueError, match=f"^({place}|class_names)"):
                metadata.check_network(altered(place, value))


@pytest.mark.parametrize("name", ["state", "world_size", "epoch_sums", "square_norms"])
def test_what_a_run_needs_must_be_there(name):
    values = meta(8)
    del values[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        metadata.check_run(values)
    metadata.check_network(values)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("state.hyper", dict.fromkeys(base.HYPER_NAMES, 0.5) | {"upper_bound": math.inf}),  # at the very first step
        ("epoch_sums", [[math.nan, 1.0, 2.0, 8.0]]),  # of an epoch with a skipped step
        ("val_top1", 1),
        ("batch_norm_epsilon", 1e-3),
    ],
)
def test_what_runs_store_is_taken(place, value):
    metadata.check_run(altered(place, value))


def test_a_long_value_is_shortened():
    with pytest.raises(ValueError, match=r"^state is 'x{39}\.\.\., not an object$"):
        metadata.check_run(meta(8) | {"state": "x" * 10_000})
