"""Options that come with what is chosen: read from the code, refused or left out elsewhere, handed over by name."""

import inspect
import pkgutil
from typing import Annotated, Literal

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.comm.settings import ALGORITHMS, Communication, Settings
from hybrid_imagenet.config import choices, derived, report, signatures
from hybrid_imagenet.config import help as flag_help
from hybrid_imagenet.errors import UserError


def function(
    required: int,
    plain: float = 1.5,
    *,
    small: Annotated[float, "0 to 0.9"] = 0.5,
    above: Annotated[int, "> 2", "images"] = 3,
    rule: Literal["add", "floor"] = "add",
    many: tuple[int, ...] = (1, 2),
    maybe: str | None = None,
):
    """A function whose arguments are read.

    Args:
      required: is no option.
      plain: a number,
        on two lines.
      small: within bounds: both inclusive.
      rule: one of two.

    Raises:
      small: is not an argument here.
    """


class TestSignatures:
    found = signatures.read(f"{__name__}:function")

    def test_names_types_and_defaults(self):
        assert {name: a.default for name, a in self.found.items()} == {
            name: p.default for name, p in inspect.signature(function).parameters.items() if name != "required"
        }
        assert self.found["many"].kind.repeated
        assert self.found["maybe"].kind.optional
        assert self.found["above"].kind.base is int

    def test_bounds_choices_units_and_help(self):
        small, above, rule = (self.found[name].option for name in ("small", "above", "rule"))
        assert (small.minimum, small.maximum, small.help) == (0.0, 0.9, "Within bounds: both inclusive.")
        assert (above.above, above.unit, above.help) == (2.0, "images", "")
        assert rule.choices == ("add", "floor")
        assert self.found["plain"].option.help == "A number, on two lines."

    def test_a_name_that_does_not_exist(self):
        with pytest.raises(LookupError, match="defines no nothing"):
            signatures.read(f"{__name__}:nothing")


def constructor_defaults(target):
    cls = pkgutil.resolve_name(target)
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_arguments_of_an_algorithm_are_its_flags(name):
    """Read from the source and by importing: the same arguments with the same defaults, each with a help text."""
    options = next(c for c in choices.CHOICES if c.flag == "allreduce").options[name]
    assert {flag: argument.default for flag, argument in options.items()} == constructor_defaults(ALGORITHMS[name])
    assert all(argument.option.help for argument in options.values())


def test_the_settings_of_communication_are_flags():
    defaults = Communication()
    for name, argument in config.fields_of(Communication).items():
        assert argument.default == getattr(defaults, name)
        assert argument.option.help
    values = ["--allreduce=hybrid", "--hybrid_threshold_kb=3", "--autotune", "--deterministic", "--fp32_gradients=a,b"]
    with pytest.raises(UserError, match="--autotune"):
        config.resolve(values)
    values.remove("--autotune")
    expected = Settings(
        allreduce="hybrid",
        fp32_gradients=("a", "b"),
        options={"torus_grid": None, "hybrid_threshold_kb": 3},
        deterministic=True,
    )
    assert derived.communication(config.resolve(values)) == expected


def test_no_option_has_two_selecting_flags_or_the_name_of_a_common_flag():
    names = [name for choice in choices.CHOICES for name in choice.names()]
    assert len(names) == len(set(names))
    assert not set(names) & set(config.COMMON)
    for owners in choices.OWNERS.values():
        assert len({owner.argument.kind for owner in owners}) == 1


REFUSED = [
    (["--torus_grid=2x2"], "--torus_grid does not go with --allreduce=ring: leave it out, or choose torus"),
    (["--allreduce=torus", "--hybrid_threshold_kb=1"], "--hybrid_threshold_kb does not go with --allreduce=torus"),
    (["--allreduce=hybrid", "--hybrid_threshold_kb=-1"], "--hybrid_threshold_kb=-1: must be at least 0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_an_option_of_something_else_is_refused_on_the_command_line(arguments, message):
    with pytest.raises(UserError, match=message):
        config.resolve(arguments)


def test_an_option_of_something_else_is_left_out_of_a_flag_file(tmp_path):
    flagfile = tmp_path / "some.flags"
    flagfile.write_text("--allreduce=torus\n--torus_grid=2x1\n")
    resolved = config.resolve([f"--flagfile={flagfile}", "--allreduce=ring"])
    assert "torus_grid" not in resolved.values()
    assert not hasattr(resolved, "torus_grid")
    text = report.describe(resolved, 20000, 2)
    assert "torus_grid" in text
    assert "not used: flagfile has 2x1, but --allreduce=ring has no --torus_grid" in text
    assert config.resolve([f"--flagfile={flagfile}"]).torus_grid == "2x1"


def test_a_flag_that_is_gone_is_ignored_with_a_line(caplog):
    values = config.resolve(["--allreduce=torus"]).values() | {"old_flag": 3, "hybrid_threshold_kb": 256}
    again = config.from_values(values)
    assert again == config.resolve(["--allreduce=torus"])
    assert "--old_flag" in caplog.text


def test_help_names_options_with_their_owners():
    text = " ".join(flag_help.text().split())
    assert "--torus_grid=str Rows x columns of GPUs, as VxH; default hosts x GPUs per host. (torus, auto;" in text
    assert "others by the ring. (hybrid; default 256, in KiB)" in text
