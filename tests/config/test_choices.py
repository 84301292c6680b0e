"""Options that come with what is chosen: read from the code, refused or left out elsewhere, handed over by name."""

import inspect
import pathlib
import pkgutil
from typing import Annotated, Literal

import pytest

from hybrid_imagenet import config, optimizers
from hybrid_imagenet.comm.settings import ALGORITHMS, Communication, Settings
from hybrid_imagenet.config import choices, derived, report, signatures
from hybrid_imagenet.config import help as flag_help
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import decays, schedules
from hybrid_imagenet.optimizers import registry
from hybrid_imagenet.optimizers.registry import OPTIMIZERS


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


OTHERS = {  # a value of each type that is not the default
    bool: lambda default: not default,
    float: lambda default: default / 2 or 0.25,
    str: lambda default: "2x1",
    int: lambda default: default + 1,
}


def another(argument):
    """A value within the bounds that is not the default."""
    if argument.option.choices:
        return next(c for c in argument.option.choices if c != argument.default)
    if argument.kind.repeated:
        return (1.0, 2.0)
    return OTHERS[argument.kind.base](argument.default)


def flags_for(arguments):
    texts = {name: another(argument) for name, argument in arguments.items()}
    return [f"--{n}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for n, v in texts.items()], texts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_arguments_of_an_optimizer_are_its_flags(name):
    """Read from the source and by importing: the same arguments with the same defaults, each with a help text."""
    method, options = OPTIMIZERS[name], choices.optimizer_options(name)
    rate = {"learning_rate"} if method.rate != "lr" else set()
    defaults = constructor_defaults(method.constructor)
    expected = {key: value for key, value in defaults.items() if key not in registry.no_flags(name) - rate}
    found = {argument.name: argument.default for argument in options.values() if argument.name in expected}
    assert found.pop("weight_decay") == method.weight_decay
    assert expected.pop("weight_decay") == 0.0, "a class decays nothing unless told"
    assert found == expected
    assert all(argument.option.help for argument in options.values())
    for target in method.also:
        declared = signatures.read(target)
        assert {flag: declared[flag].default for flag in declared} == {flag: options[flag].default for flag in declared}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_flag_of_an_optimizer_reaches_its_constructor_and_survives_a_round_trip(name):
    method, options = OPTIMIZERS[name], choices.optimizer_options(name)
    own = signatures.read(method.constructor)
    flags, values = flags_for({flag: a for flag, a in options.items() if a.name in own})
    batch = "--per_gpu_batch=128"  # decoupled decay is that of 256 images
    arguments = derived.optimizer_arguments(config.resolve([f"--optimizer={name}", batch, *flags], 2))
    optimizer = optimizers.create(**arguments)
    made = optimizer.get_config()
    assert {flag: made[options[flag].name] for flag in values} == values
    given = {key: value for key, value in arguments.items() if key != "optimizer"}
    assert {key: made[key] for key in given} == given
    assert set(made) - set(given) <= registry.no_flags(name)
    assert type(optimizer).from_config(made).get_config() == made


@pytest.mark.parametrize(
    ("optimizer", "argument", "flag"),
    [
        ("lars", "eta", "lars_eta"),
        ("hybrid", "lars_eta", "lars_eta"),
        ("hybrid", "handover", "hybrid_handover"),
        ("adabound", "beta1", "adabound_beta1"),
        ("adabound", "learning_rate", "adabound_lr"),
        ("sgd", "momentum", "momentum"),
    ],
)
def test_a_flag_is_the_optimizer_and_the_argument(optimizer, argument, flag):
    assert choices.optimizer_options(optimizer)[flag].name == argument


@pytest.mark.parametrize("name", decays.SCHEDULES)
def test_every_flag_of_a_schedule_changes_its_rates(name):
    base = ["--optimizer=sgd", f"--lr_schedule={name}", "--warmup_epochs=5"]

    def rates(*flags):
        schedule = schedules.create(**derived.schedule_arguments(config.resolve([*base, *flags], 2)))
        return [schedule(e / 2, e / 2, 512)["learning_rate"] for e in range(180)]

    options = choices.schedule_options(name)
    assert all(argument.option.help for argument in options.values())
    for flag in flags_for(options)[0]:
        assert rates(flag) != rates(), flag


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_other_option_of_an_optimizer_changes_the_schedule_or_the_rate(name):
    own = signatures.read(OPTIMIZERS[name].constructor)
    options = {flag: a for flag, a in choices.optimizer_options(name).items() if a.name not in own}

    def evaluated(*flags):
        rate = f"--{OPTIMIZERS[name].rate}=0.2"  # above the default start of a linear warmup
        resolved = config.resolve([f"--optimizer={name}", rate, *flags], 2)
        schedule = schedules.create(**derived.schedule_arguments(resolved))
        values = [tuple(schedule(e / 2, e / 2 + 0.25, 1024).values()) for e in range(40)]
        return values, derived.optimizer_arguments(resolved)

    assert options
    for flag in flags_for(options)[0]:
        assert evaluated(flag) != evaluated(), flag


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
    values = ["--allreduce=size_switched", "--size_switch_kb=3", "--deterministic", "--fp32_gradients=a,b"]
    expected = Settings(
        allreduce="size_switched",
        fp32_gradients=("a", "b"),
        options={"torus_grid": None, "size_switch_kb": 3},
        deterministic=True,
    )
    assert derived.communication(config.resolve(values)) == expected


def test_no_option_has_two_selecting_flags_or_the_name_of_a_common_flag():
    names = [name for choice in choices.CHOICES for name in choice.names()]
    assert [choice.flag for choice in choices.CHOICES] == ["optimizer", "lr_schedule", "allreduce"]
    assert len(names) == len(set(names))
    assert not set(names) & set(config.COMMON)
    for owners in choices.OWNERS.values():
        assert len({owner.argument.kind for owner in owners}) == 1


REFUSED = [
    (["--sgd_nesterov"], "--sgd_nesterov does not go with --optimizer=hybrid: leave it out, or choose sgd"),
    (["--optimizer=sgd", "--lars_eta=0.1"], "--lars_eta does not go with --optimizer=sgd: .* choose hybrid or lars"),
    (["--optimizer=adabound", "--momentum=0.8"], "--momentum does not go with --optimizer=adabound"),
    (["--optimizer=adabound", "--adabound_lr=0"], "--adabound_lr=0: must be above 0"),
    (["--optimizer=adabound", "--adabound_gamma=0"], "--adabound_gamma=0: must be above 0"),
    (["--lr_steps=3"], "--lr_steps does not go with --lr_schedule=exponential: leave it out, or choose step"),
    (["--recipe=hal", "--lr_decay=0.8"], "--lr_decay does not go with --lr_schedule=step"),
    (["--lars_eps_rule=ceiling"], "--lars_eps_rule=ceiling: choose one of add, floor"),
    (["--torus_grid=2x2"], "--torus_grid does not go with --allreduce=ring: leave it out, or choose torus"),
    (["--allreduce=torus", "--size_switch_kb=1"], "--size_switch_kb does not go with --allreduce=torus"),
    (["--allreduce=size_switched", "--size_switch_kb=-1"], "--size_switch_kb=-1: must be at least 0"),
    (["--engine=tensorflow", "--cycle_time_ms=2"], "--cycle_time_ms=2 is Horovod's and does not go with"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_an_option_of_something_else_is_refused_on_the_command_line(arguments, message):
    with pytest.raises(UserError, match=message):
        config.resolve(arguments)


def test_an_option_of_something_else_is_left_out_of_a_flag_file(tmp_path):
    flagfile = tmp_path / "some.flags"
    flagfile.write_text("--allreduce=torus\n--torus_grid=2x1\n")
    resolved = config.resolve([f"--flagfile={flagfile}", "--allreduce=ring"], 2)
    assert "torus_grid" not in resolved.values()
    assert not hasattr(resolved, "torus_grid")
    text = report.describe(resolved, 20000)
    assert "torus_grid" in text
    assert "not used: flagfile has 2x1, but --allreduce=ring has no --torus_grid" in text
    assert config.resolve([f"--flagfile={flagfile}"]).torus_grid == "2x1"


def test_a_recipe_over_the_flag_file_of_another_method(monkeypatch):
    """As `launch/local.sh --recipe=hal` does."""
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    resolved = config.resolve(["--flagfile=flags/digits.flags", "--recipe=hal"], 2)
    assert set(resolved.dropped) == {"lr_decay", "lars_eta"}
    text = report.describe(resolved, 1500)
    assert "not used: flagfile has 0.02, but --optimizer=sgd has no --lars_eta" in text
    assert derived.optimizer_arguments(resolved)["optimizer"] == "sgd"


def test_help_names_options_with_their_owners():
    text = " ".join(flag_help.text("all").split())
    assert "--torus_grid=str Rows x columns of GPUs, as VxH; default hosts x GPUs per host. (torus, auto;" in text
    assert "others by the ring. (size_switched; default 256, in KiB)" in text
