"""Tests that wrong settings of Keras are found before Keras is imported."""

import json
import sys

import pytest

from hybrid_imagenet import main
from hybrid_imagenet.cluster import keras_settings
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import UserError


@pytest.fixture
def keras_home(tmp_path, monkeypatch):
    """Sets the directory of keras.json, in a process that has not imported Keras."""
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("backend", "jax", 'backend tensorflow, but {file} says "backend": "jax"'),
        ("image_data_format", "channels_first", "image data format channels_last, but {file} says"),
        ("floatx", "float16", "floatx float32, but {file} says"),
    ],
)
def test_check_keras_settings_with_a_wrong_value_raises_file_and_line(
    keras_home, name, value, message
):
    file = keras_home / "keras.json"
    file.write_text(json.dumps({"epsilon": 1e-7, name: value}))
    with pytest.raises(UserError) as error:
        keras_settings.check_keras_settings({"KERAS_HOME": str(keras_home)})
    assert message.format(file=file) in str(error.value)
    assert "Change that line, or remove the file" in str(error.value)


def test_check_keras_settings_accepts_files_that_keras_accepts(keras_home):
    environment = {"KERAS_HOME": str(keras_home)}
    keras_settings.check_keras_settings(environment)
    file = keras_home / "keras.json"
    needed = {"backend": "tensorflow", "image_data_format": "channels_last", "floatx": "float32"}
    for text in (json.dumps(needed), "no JSON"):
        file.write_text(text)
        keras_settings.check_keras_settings(environment)
    file.write_text('{"backend": "torch"}')
    # Keras prefers the variable to the file, so the check does too.
    keras_settings.check_keras_settings(environment | {"KERAS_BACKEND": "tensorflow"})
    file.write_text("[]")
    with pytest.raises(UserError, match="Remove it"):
        keras_settings.check_keras_settings(environment)


def test_train_and_init_reject_another_backend(keras_home, monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    message = (
        "needs Keras with backend tensorflow, but KERAS_BACKEND is jax. Unset it, or set it to"
        " tensorflow."
    )
    with pytest.raises(UserError, match=message):
        process.configure_process()
    assert main.main(["--dataset=synthetic", "--check_only"]) == 2
    assert message in capsys.readouterr().err
