"""Networks of a user's function (`--model=MODULE:FUNCTION`)."""

import keras
import pytest

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory

MODULE = """
import keras

SHARED = keras.layers.ReLU()


def network(num_classes, image_size):
    layers = [keras.layers.Flatten(), SHARED, keras.layers.Dense(4), keras.layers.ReLU()]
    image = keras.Input((image_size, image_size, 3))
    values = image
    for layer in layers:
        values = layer(values)
    return keras.Model(image, keras.layers.Dense(num_classes)(values))
"""


@pytest.mark.parametrize("layers_before", [0, 2])
def test_create_with_layers_built_at_import_numbers_all_layers_from_zero(
    tmp_path, monkeypatch, layers_before
):
    module = f"user_network_{layers_before}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(layers_before):
        keras.layers.ReLU()
    # The module is imported by the first call only.
    for _ in range(2):
        network = factory.create(f"{module}:network", 3, 8)
        names = [layer.name for layer in network.layers if "input" not in layer.name]
        assert names == ["flatten", "re_lu", "dense", "re_lu_1", "dense_1"]


def test_create_with_a_module_that_is_not_valid_python_names_its_line(tmp_path, monkeypatch):
    (tmp_path / "invalid_network.py").write_text("import keras\ndef small(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        r"^--model=invalid_network:small: SyntaxError: invalid syntax \(invalid_network\.py, line 2"
        r"\)\. Correct the module\.$"
    )
    with pytest.raises(UserError, match=message):
        factory.create("invalid_network:small", 3, 8)
