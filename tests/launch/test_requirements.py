"""Tests that imported packages are in pyproject.toml and pinned in constraints.txt."""

import ast
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hybrid_imagenet
from tests.launch.shell import LAUNCH, ROOT

# Distributions whose import name differs.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "google_crc32c": "google-crc32c",
    "pyarrow": "pyarrow",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
    "yaml": "pyyaml",
}
# XLA's compiler for GPUs, with which some tests compile if it is installed.
COMPILER_OF_TESTS = {"jax", "jaxlib"}
# Dependencies of TensorFlow, Horovod or pip.
INSTALLED_WITH_OTHERS = {
    "cloudpickle",
    "google",
    "h5py",
    "ml_dtypes",
    "packaging",
    "setuptools",
    "tensorboard",
    "yaml",
    "numpy",
    "scipy",
}


@pytest.fixture(scope="module")
def metadata() -> dict:
    """Returns the [project] table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _requirements(metadata: dict) -> dict[str, Requirement]:
    extras = metadata["optional-dependencies"]
    # launch/setup.sh does not install the extra `docs`, because the site uses the latest versions.
    texts = [
        *metadata["dependencies"],
        *(r for name, extra in extras.items() if name != "docs" for r in extra),
    ]
    # An extra may include another extra of the package.
    texts = [text for text in texts if Requirement(text).name != metadata["name"]]
    return {canonicalize_name(r.name): r for r in map(Requirement, texts)}


def _pins(tensorflow: str = "") -> dict[str, Requirement]:
    """Returns the pins for this Python, with those of another TensorFlow if one is named."""
    files = ["constraints.txt"] + ([f"tensorflow-{tensorflow}.txt"] if tensorflow else [])
    pins: dict[str, Requirement] = {}
    for file in files:
        lines = (LAUNCH / file).read_text().splitlines()
        requirements = [
            Requirement(line.partition(" --hash=")[0])
            for line in lines
            if line and not line.startswith("#")
        ]
        pins |= {
            canonicalize_name(p.name): p
            for p in requirements
            if p.marker is None or p.marker.evaluate()
        }
    return pins


def _imported_modules(folder: Path) -> set[str]:
    """Returns the top-level names of modules that a directory imports from outside."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.partition(".")[0])
    return (
        names - set(sys.stdlib_module_names) - {"benchmarks", "hybrid_imagenet", "studies", "tests"}
    )


@pytest.mark.parametrize(
    ("folder", "optional"), [("hybrid_imagenet", set()), ("tests", COMPILER_OF_TESTS)]
)
def test_imports_of_a_folder_are_requirements(metadata, folder, optional):
    required = set(_requirements(metadata)) | {"tensorflow"}
    # Programs that are started by path may import modules next to them.
    local = {p.stem for p in (ROOT / folder).rglob("*.py")}
    imported = _imported_modules(ROOT / folder) - optional - INSTALLED_WITH_OTHERS - local
    names = {canonicalize_name(DISTRIBUTIONS.get(n, n)) for n in imported}
    assert not names - required


@pytest.mark.parametrize(
    "tensorflow", ["", *(p.stem.partition("-")[2] for p in LAUNCH.glob("tensorflow-*.txt"))]
)
def test_requirements_are_pinned_within_their_ranges(metadata, tensorflow):
    pins = _pins(tensorflow)
    for name, requirement in _requirements(metadata).items():
        (exact,) = pins[name].specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), name


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_extras_with_tensorflow_include_mpi(metadata, extra):
    # `hybrid-imagenet run` must work after the installation that the documentation describes.
    assert "hybrid_imagenet[mpi]" in metadata["optional-dependencies"][extra]


def test_version_in_the_metadata_is_that_of_the_package(metadata):
    assert metadata["dynamic"] == ["version"]
    assert importlib.metadata.version("hybrid_imagenet") == hybrid_imagenet.__version__


def _closure(requirements: list[str], metadata: dict, extras: set[str]) -> set[str]:
    """Returns the packages that requirements and extras need, as far as they are installed."""
    texts = [*requirements]
    for extra in extras:
        texts += metadata["optional-dependencies"][extra]
    pending = [Requirement(text) for text in texts]
    known: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement = pending.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in known:
            continue
        known.add(key)
        try:
            texts = importlib.metadata.requires(requirement.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for dependency in map(Requirement, texts):
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if dependency.marker is None or any(map(dependency.marker.evaluate, environments)):
                pending.append(dependency)
    return {name for name, _ in known}


def test_only_tests_has_every_package_that_training_does_not_need(metadata):
    names = (LAUNCH / "only_tests.txt").read_text().splitlines()
    only_tests = {canonicalize_name(name) for name in names if not name.startswith("#")}
    tests_extras = {"bench", "peers", "studies", "test"}
    others = set(metadata["optional-dependencies"]) - tests_extras - {"cpu", "docs", "gpu"}
    training = _closure(metadata["dependencies"], metadata, others)
    training |= _closure(["tensorflow", "tensorflow-cpu"], metadata, set())
    tests = _closure([], metadata, tests_extras)
    assert {"keras", "mpi4py", "numpy", "onnx", "tensorflow-datasets"} <= training
    # Keras imports these three at each start if they are installed.
    assert {"matplotlib", "scikit-learn", "scipy"} <= only_tests
    assert tests - training <= only_tests
    assert not only_tests & training
    assert only_tests <= set(_pins())
