"""Finds the options that come with each value of a flag that selects code.

The optimizers, schedules and all-reduce algorithms are listed in registries, one line each; their options are read
from the code itself (`config.signatures`). A configuration holds only the options of what is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.config import signatures
from hybrid_imagenet.config.options import Origin, check_value
from hybrid_imagenet.config.signatures import Argument
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.decays import SCHEDULES
from hybrid_imagenet.optimizers import registry
from hybrid_imagenet.optimizers.registry import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class Choice:
    """A flag that selects one of several classes or functions.

    Attributes:
      flag: its name.
      options: for each value of the flag the options that it brings, by the name of their flag.
    """

    flag: str
    options: Mapping[str, Mapping[str, Argument]]

    def owners(self, name: str) -> list[str]:
        """The values of the flag that bring an option."""
        return [value for value, options in self.options.items() if name in options]

    def names(self) -> list[str]:
        """Every option of any value, in the order of declaration."""
        return list(dict.fromkeys(name for options in self.options.values() for name in options))

    def selector(self, argument: Argument) -> Argument:
        """The argument that selects, with its choices."""
        option = dataclasses.replace(argument.option, choices=tuple(self.options))
        return dataclasses.replace(argument, option=option)


@dataclasses.dataclass(frozen=True)
class Owner:
    """The declaration of an option.

    Attributes:
      flag: the flag that selects.
      value: its value.
      argument: what is declared there.
    """

    flag: str
    value: str
    argument: Argument


def optimizer_options(name: str) -> dict[str, Argument]:
    """The options of an optimizer by flag: of its constructor, and of what else a run with it evaluates."""
    method, base = OPTIMIZERS[name], signatures.read(registry.BASE)
    found: dict[str, Argument] = {}
    for argument in signatures.read(method.constructor).values():
        if argument.name in registry.no_flags(name) and registry.rate_argument(name) != argument.name:
            continue
        flag = registry.flag(name, argument.name, frozenset(base))
        option = base[flag].option if flag in base else argument.option
        default = method.weight_decay if flag == "weight_decay" else argument.default
        found[flag] = dataclasses.replace(argument, option=option, default=default)
    for target in method.also:
        found |= {name: argument for name, argument in signatures.read(target).items() if name not in found}
    return found


def schedule_options(name: str) -> Mapping[str, Argument]:
    """The options of a learning rate schedule."""
    function = SCHEDULES[name].rate
    return signatures.read(f"{function.__module__}:{function.__name__}")


CHOICES = (
    Choice("optimizer", {name: optimizer_options(name) for name in OPTIMIZERS}),
    Choice("lr_schedule", {name: schedule_options(name) for name in SCHEDULES}),
    Choice("allreduce", {name: signatures.read(target) for name, target in ALGORITHMS.items()}),
)
OWNERS = {
    name: [Owner(choice.flag, value, choice.options[value][name]) for value in choice.owners(name)]
    for choice in CHOICES
    for name in choice.names()
}
"""The owners of each option."""


def defaults(selected: Mapping[str, str]) -> dict[str, Any]:
    """The defaults of the options of all that is selected."""
    return {name: a.default for choice in CHOICES for name, a in choice.options[selected[choice.flag]].items()}


def take(
    values: MutableMapping[str, Any], origins: MutableMapping[str, Origin], selected: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Takes the options of all that is selected out of `values`, with defaults for those not given.

    Args:
      values: given values by flag; options are removed from it.
      origins: what gave each value; entries of options that are left out are removed.
      selected: the value of each flag in `CHOICES`.

    Returns:
      The options of what is selected, and a note on each option that was left out because what is selected does not
      have it.

    Raises:
      UserError: for such an option on the command line, or a value that is out of its bounds.
    """
    chosen: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for choice in CHOICES:
        here = selected[choice.flag]
        for name in choice.names():
            argument = choice.options[here].get(name)
            if argument is not None:
                chosen[name] = values.pop(name, argument.default)
                check_value(name, chosen[name], argument.option)
            elif name in values:
                value, origin = values.pop(name), origins.pop(name)
                owners = " or ".join(choice.owners(name))
                if origin is Origin.COMMAND_LINE:
                    raise UserError(
                        f"--{name} does not go with --{choice.flag}={here}: leave it out, or choose {owners}"
                    )
                dropped[name] = f"{origin.value} has {value}, but --{choice.flag}={here} has no --{name}"
    return chosen, dropped


def options_for(flag: str, value: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options that belong to one value of a flag, out of all that are chosen."""
    options = next(choice.options[value] for choice in CHOICES if choice.flag == flag)
    return {name: chosen[name] for name in options}
