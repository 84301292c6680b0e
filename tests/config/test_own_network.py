"""--model=MODULE:FUNCTION is found without importing the module."""

import pytest

from hybrid_imagenet.config import own_network
from hybrid_imagenet.errors import UserError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules cannot be imported, with networks in one of them."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "nets.py").write_text(
        "import no_such_module as lib\ntry:\n    from lib import made\nexcept ImportError:\n    made = None\n"
        "def small(num_classes, image_size): ...\nclass Large: ...\n"
    )
    (folder / "star.py").write_text("from lib import *\n")
    (folder / "broken.py").write_text("def (\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize("function", ["small", "Large", "Large.build", "made"])
def test_what_a_module_defines_is_found_unimported(package, function):
    assert own_network.locate(f"own_package.nets:{function}") == package / "nets.py"


def test_names_that_another_module_may_give_are_not_refused(package):
    assert own_network.locate("own_package.star:any") == package / "star.py"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no_such_module_anywhere:net", "there is no module no_such_module_anywhere"),
        ("own_package.absent:net", "there is no module own_package.absent"),
        ("own_package.nets.deeper:net", "there is no module own_package.nets.deeper"),
        ("own_package.nets:smal", r"nets.py defines no smal \(did you mean small\?\)"),
        ("own_package.nets:", "defines no function"),
        ("own_package.broken:net", "broken.py cannot be read"),
        (":net", "there is no module"),
    ],
)
def test_what_is_not_there_is_one_line(package, target, text):
    with pytest.raises(UserError, match=f"--model={target}: .*{text}"):
        own_network.locate(target)
