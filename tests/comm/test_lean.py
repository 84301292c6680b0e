"""Packages that are left out while TensorFlow loads."""

import importlib
import sys

import pytest

from hybrid_imagenet.comm import lean


def test_a_package_looks_absent_inside_and_can_be_imported_afterwards(tmp_path, monkeypatch):
    for name in ("left_out_here", "loaded_before"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lean, "NOT_NEEDED", ("left_out_here", "loaded_before", "not_installed_at_all"))
    loaded = importlib.import_module("loaded_before")
    with pytest.raises(RuntimeError, match="of TensorFlow"), lean.without_extras():
        with pytest.raises(ImportError):
            importlib.import_module("left_out_here")
        assert importlib.import_module("loaded_before") is loaded
        raise RuntimeError("of TensorFlow")
    assert importlib.import_module("left_out_here").value == 1
    assert "not_installed_at_all" not in sys.modules
    for name in ("left_out_here", "loaded_before"):
        monkeypatch.delitem(sys.modules, name)
