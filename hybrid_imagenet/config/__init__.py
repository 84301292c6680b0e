"""Resolves the configuration of a run: one frozen `RunConfig` with every setting.

A `RunConfig` has an attribute for each group of flags. In its group, a flag is a field of the same
name: --dataset is `config.data.dataset`. The options of the chosen optimizer, schedule and
all-reduce are objects of the dataclasses that declare them: `config.optimizer_options` is a
`LarsOptions` with --optimizer=lars. The modules:

* `flags` declares groups and options.
* `flag_checks` has the rules for flags that depend on each other.
* `resumed_run` has the rule for a run that is resumed.
* `defaults` derives defaults from the flags, and `derived` what these follow from.
* `help` writes the text of --help.

Nothing here imports TensorFlow, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from absl import flags as absl_flags

from hybrid_imagenet import files, recipes
from hybrid_imagenet.comm.settings import ALGORITHMS, AllReduceOptions, CommunicationFlags
from hybrid_imagenet.config import defaults, flag_checks, resumed_run
from hybrid_imagenet.config.flags import (
    CHOICES,
    COMMON,
    GROUP_OF_FLAG,
    GROUPS,
    OPTIONS,
    REMOVED,
    DataFlags,
    EvaluationFlags,
    NetworkFlags,
    OptimizationFlags,
    RunFlags,
    owners,
)
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError, did_you_mean, without_secrets
from hybrid_imagenet.optimizers.registry import OPTIMIZERS, Options
from hybrid_imagenet.options import (
    Option,
    Origin,
    check_value,
    flag_values,
    from_flags,
    normalize_flag,
    options_of,
    parse_arguments,
    parse_value,
)
from hybrid_imagenet.schedules.training_schedule import SCHEDULES, Decay, Rule

AnyRule = TypeVar("AnyRule", bound=Rule)

# Option declarations that can be used before optimizer, schedule and all-reduce are chosen. The
# bounds of their options are checked later.
_OPTIONS_BEFORE_CHOICES = {
    name: COMMON.get(name, Option("", kind=option.kind)) for name, option in OPTIONS.items()
}

# --print_config is a boolean, which scripts set without a value. Its third value is a separate
# flag.
_PRINT_ALL = "--print_config=all"

PATH_FLAGS = ("run_dir", "data_dir", "data_cache_dir", "init_from")
"""Flags whose value must not be empty on the command line.

A script that writes --run_dir=$DIRECTORY without this variable would use another directory.
"""

# A resumed run may have options that it does not use.
_ORIGINS_OF_RESUMED_RUN = (Origin.RUN, Origin.EARLIER_START, Origin.BATCH, Origin.DEFAULT)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Every setting of a run on a number of GPUs, as `resolve` returns it.

    A function that needs the flags of one group takes this group, not the whole configuration.

    Attributes:
      run: Recipe, directory, length, seed and output of the run.
      evaluation: Validations and checkpoints.
      data: Dataset, augmentation and loss.
      network: Network, its normalization, precision and compilation.
      optimization: Batch, optimizer, learning rate and schedule.
      communication: How the ranks communicate.
      optimizer_options: Options of the chosen optimizer. Its learning rates are not scaled yet.
      optimizer_rules: Options of the schedule that only some optimizers have.
      schedule_options: The chosen schedule, with its options.
      allreduce_options: Options of the chosen all-reduce.
      gpus: N, the number of GPUs that learning rates and batches follow. With --virtual_gpus each
        rank counts as several.
      origins: What set each value.
      dropped: Notes on options that were given but that nothing chosen has.
      kept_notes: A line for each value of a resumed run that a new run would not have.
    """

    run: RunFlags
    evaluation: EvaluationFlags
    data: DataFlags
    network: NetworkFlags
    optimization: OptimizationFlags
    communication: CommunicationFlags
    optimizer_options: Options
    optimizer_rules: tuple[Rule, ...]
    schedule_options: Decay
    allreduce_options: AllReduceOptions
    gpus: int = 1
    origins: Mapping[str, Origin] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    kept_notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.gpus // self.optimization.virtual_gpus

    @property
    def chosen_options(self) -> dict[str, Any]:
        """Options of the chosen optimizer, schedule and all-reduce, by flag."""
        chosen = (
            self.optimizer_options,
            *self.optimizer_rules,
            self.schedule_options,
            self.allreduce_options,
        )
        values: dict[str, Any] = {}
        for options in chosen:
            values |= flag_values(options)
        return values

    def rule(self, rule_class: type[AnyRule]) -> AnyRule | None:
        """Returns the options of a rule of the schedule; None if the optimizer does not have it."""
        for rule in self.optimizer_rules:
            if isinstance(rule, rule_class):
                return rule
        return None

    def get(self, name: str) -> Any:
        """Returns the value of a flag by its name, which is a variable of the caller.

        Raises:
          KeyError: If there is no such flag, or nothing that was chosen has this option.
        """
        if name in GROUP_OF_FLAG:
            return getattr(getattr(self, GROUP_OF_FLAG[name]), name)
        return self.chosen_options[name]

    def as_dict(self) -> dict[str, Any]:
        """Returns every setting by flag, in the order of --help."""
        values: dict[str, Any] = {}
        for name in COMMON:
            values[name] = self.get(name)
            if name in CHOICES:
                for option in CHOICES[name][values[name]]:
                    values[option] = self.get(option)
        return values

    def replace(self, origin: Origin, **changes: Any) -> RunConfig:
        """Returns this configuration with other values, which `origin` has set."""
        origins = {**self.origins, **dict.fromkeys(changes, origin)}
        return dataclasses.replace(self, **_fields({**self.as_dict(), **changes}), origins=origins)

    def with_values(self, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> RunConfig:
        """Returns a configuration for as many ranks with these values.

        Args:
          values: Every setting by flag, as `as_dict` returns them.
          origins: What set them, where that is not as it was.
        """
        gpus = self.ranks * values["virtual_gpus"]
        known_origins = {name: self.origins.get(name, Origin.DEFAULT) for name in values}
        return dataclasses.replace(
            self, **_fields(values), gpus=gpus, origins={**known_origins, **origins}
        )

    def as_masked_dict(self) -> dict[str, Any]:
        """Returns the settings in JSON types, without passwords and tokens."""
        flags = json.loads(json.dumps(self.as_dict()))
        return {
            name: without_secrets(value) if isinstance(value, str) else value
            for name, value in flags.items()
        }

    def stored(self) -> dict[str, dict[str, Any]]:
        """Returns what config.json stores: the settings, and what set each of them."""
        flags = self.as_masked_dict()
        # The run may be resumed from another working directory.
        for name in ("data_dir", "data_cache_dir", "init_from"):
            if flags[name] and not files.is_url(flags[name]):
                flags[name] = str(files.expand_home(flags[name]).absolute())
        origins = {name: origin.value for name, origin in self.origins.items()}
        return {"flags": flags, "origins": origins}


def resolve(arguments: Sequence[str], ranks: int = 1, *, before: Sequence[str] = ()) -> RunConfig:
    """Builds the configuration of a run from command-line arguments (without the program's name).

    Later sources win: default, recipe, flag file, command line. A run that is resumed takes its own
    settings instead of defaults and recipe (see `resumed_run`). Then the defaults that follow from
    batch, data and number of GPUs are derived (see `defaults`).

    Args:
      arguments: Words of the command line.
      ranks: Number of ranks; --print_config_gpus takes precedence.
      before: Arguments that count as a flag file before them.

    Raises:
      UserError: One line that names the flag, its value and the remedy.
    """
    requested = _parse_requested(arguments, before)
    resumed, recipe, recipe_origin = _choose_recipe(requested)
    overrides = dict(recipes.load(recipe).overrides)
    for name, value in overrides.items():
        check_value(name, value, _OPTIONS_BEFORE_CHOICES[name])
    values = dict(overrides)
    origins = dict.fromkeys(overrides, Origin.RECIPE)
    kept: dict[str, Any] = {}
    if resumed is not None:
        resumed.check_known()
        replaced = requested.values
        if resumed.recipe not in (None, recipe):
            replaced = overrides | requested.values
        kept, kept_origins = resumed.kept(recipe, replaced)
        values |= kept
        origins |= kept_origins
    values |= requested.values | {"recipe": recipe}
    origins |= requested.origins | {"recipe": recipe_origin}
    config = _build(values, origins, ranks)
    config = defaults.on_hardware(config, kept)
    if resumed is not None:
        notes = resumed.changed_defaults(config, overrides, defaults.default_batch(config))
        config = dataclasses.replace(config, kept_notes=notes)
    flag_checks.check(config)
    return defaults.complete(config)


def from_stored(content: Mapping[str, Any], ranks: int) -> RunConfig:
    """Returns the configuration with which a run was last started.

    Nothing is derived again, because config.json has every value.

    Args:
      content: Content of config.json, see `stored.read`.
      ranks: Number of ranks if the file has none.

    Raises:
      UserError: For a value that is not possible any more.
    """
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content["flags"].items()
        if name in OPTIONS
    }
    for name, value in values.items():
        check_value(name, value, OPTIONS[name])
    origins = dict.fromkeys(values, Origin.DEFAULT)
    origins |= {name: Origin(content["origins"].get(name, Origin.DEFAULT)) for name in values}
    return _build(values, origins, content.get("world_size", ranks))


class _RequestedFlags(NamedTuple):
    """The flags in flag files and on the command line.

    Attributes:
      values: Value of each flag.
      origins: What set each value, a flag file or the command line.
      has_flagfile: Whether there is a flag file.
    """

    values: dict[str, Any]
    origins: dict[str, Origin]
    has_flagfile: bool


def _parse_requested(arguments: Sequence[str], before: Sequence[str]) -> _RequestedFlags:
    """Parses the arguments of `resolve`."""
    from_files, from_command = split_flagfiles(arguments)
    from_files = [*before, *from_files]
    from_command = [
        "--print_config_all" if normalize_flag(word) == _PRINT_ALL else word
        for word in from_command
    ]
    _check_not_removed([*from_files, *from_command])
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for origin, words in (
        (Origin.FLAGFILE, from_files),
        (Origin.COMMAND_LINE, from_command),
    ):
        for name, text in parse_arguments(words, _OPTIONS_BEFORE_CHOICES).items():
            if not text and name in PATH_FLAGS and origin is Origin.COMMAND_LINE:
                raise UserError(f"--{name} has no value. Write --{name}=PATH, or omit the flag.")
            values[name] = parse_value(name, text, _OPTIONS_BEFORE_CHOICES[name])
            origins[name] = origin
    return _RequestedFlags(values, origins, has_flagfile=bool(from_files))


def _check_not_removed(words: Sequence[str]) -> None:
    """Raises UserError for a flag that was removed."""
    for word in words:
        name = normalize_flag(word).lstrip("-").partition("=")[0]
        remedy = REMOVED.get(name) or REMOVED.get(name.removeprefix("no"))
        if word.startswith("-") and remedy is not None:
            raise UserError(f"--{name} was removed. {remedy}")


def _choose_recipe(
    requested: _RequestedFlags,
) -> tuple[resumed_run.ResumedRun | None, str, Origin]:
    """Returns the run that is resumed, if there is one, the recipe and what has set it.

    A run that is resumed keeps its recipe. Otherwise a flag file implies hybrid, because flag files
    have always been written for it, and without one the dataset decides.
    """
    flags = requested.values
    dataset = flags.get("dataset", DataFlags.dataset)
    default = RunFlags.recipe
    if not requested.has_flagfile:
        default = datasets.source_type(dataset).default_recipe
    resumed = None
    if flags.get("resume"):
        resumed = resumed_run.find(dataset, flags.get("recipe"), flags.get("run_dir"), default)
    if "recipe" in flags:
        return resumed, flags["recipe"], requested.origins["recipe"]
    if resumed is not None and resumed.recipe is not None:
        return resumed, resumed.recipe, Origin.RUN
    return resumed, default, Origin.DEFAULT if default == RunFlags.recipe else Origin.DATA


def _build(values: dict[str, Any], origins: dict[str, Origin], ranks: int) -> RunConfig:
    dropped = _keep_chosen_options(values, origins)
    if values.get("augmentation", COMMON["augmentation"].default) == "auto":
        dataset = values.get("dataset", COMMON["dataset"].default)
        values["augmentation"] = datasets.source_type(dataset).default_augmentation
        if "augmentation" not in origins:
            origins["augmentation"] = Origin.DATA
    if values.get("print_config_all"):
        values["print_config"] = True
    config = RunConfig(**_fields(values), dropped=dropped)
    default_origins = dict.fromkeys([*COMMON, *config.chosen_options], Origin.DEFAULT)
    config = dataclasses.replace(config, origins=default_origins | origins)
    run = config.run
    assumed_gpus = run.print_config_gpus if run.print_config or run.check_only else None
    gpus = assumed_gpus or ranks * config.optimization.virtual_gpus
    return dataclasses.replace(config, gpus=gpus)


def _keep_chosen_options(values: dict[str, Any], origins: dict[str, Origin]) -> dict[str, str]:
    """Adds defaults of the options of the chosen optimizer, schedule and all-reduce to `values`.

    The options of others are removed from `values` and `origins`.

    Returns:
      A note on each removed option, by flag.

    Raises:
      UserError: For an option of another optimizer, schedule or all-reduce on the command line, or
        a value that is out of its bounds.
    """
    dropped: dict[str, str] = {}
    for flag, by_value in CHOICES.items():
        choice = values.get(flag, COMMON[flag].default)
        for name, option in by_value[choice].items():
            values.setdefault(name, option.default)
            check_value(name, values[name], option)
        others = [name for name in values if owners(flag, name) and name not in by_value[choice]]
        for name in others:
            value = values.pop(name)
            origin = origins.pop(name)
            if origin in _ORIGINS_OF_RESUMED_RUN:
                continue
            if origin is Origin.COMMAND_LINE:
                choices = " or ".join(owners(flag, name))
                raise UserError(
                    f"--{name} cannot be combined with --{flag}={choice}. Omit it, or use"
                    f" --{flag}={choices}."
                )
            dropped[name] = f"{origin.value} has {value}, but --{flag}={choice} has no --{name}"
    return dropped


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `RunConfig` for values by flag.

    Args:
      values: All options of the chosen optimizer, schedule and all-reduce, and other flags.

    Raises:
      ValueError: For a flag that the configuration does not have.
    """
    remaining = dict(values)
    fields: dict[str, Any] = {}
    for attribute, group in GROUPS.items():
        names = [name for name in options_of(group) if name in remaining]
        fields[attribute] = group(**{name: remaining.pop(name) for name in names})
    spec = OPTIMIZERS[fields["optimization"].optimizer]
    fields["optimizer_options"] = from_flags(spec.options, remaining)
    fields["optimizer_rules"] = tuple(from_flags(rule, remaining) for rule in spec.rules)
    schedule = SCHEDULES[fields["optimization"].lr_schedule]
    fields["schedule_options"] = from_flags(schedule, remaining)
    algorithm = ALGORITHMS[fields["communication"].allreduce]
    fields["allreduce_options"] = from_flags(algorithm.options, remaining)
    chosen = {**spec.flags, **options_of(schedule), **options_of(algorithm.options)}
    unknown = [name for name in remaining if name not in chosen]
    if unknown:
        raise ValueError(f"a configuration with these choices has no {', '.join(unknown)}")
    return fields


def split_flagfiles(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments in flag files, and those that are on the command line itself."""
    from_files: list[str] = []
    from_command: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name.lstrip("-") != "flagfile" or not name.startswith("-"):
            from_command.append(word)
            continue
        if not equals:
            if not queue:
                raise UserError("--flagfile has no value. Write --flagfile=FILE.")
            value = queue.pop(0)
        from_files.extend(_read_flagfile(value))
    return from_files, from_command


def _find_flagfile(value: str) -> Path:
    """Returns the path of a flag file.

    Args:
      value: The path, or else the name of a flag file of the program: `NAME`, `NAME.flags` or
        `flags/NAME.flags`, which is its path in a checkout.

    Raises:
      UserError: If there is no such file.
    """
    if not value:
        raise UserError("--flagfile has no value. Write --flagfile=FILE.")
    path = files.expand_home(value)
    try:
        if path.exists() and not path.is_dir():
            return path
    except OSError as error:
        raise UserError(f"--flagfile={value}: cannot be read ({error.strerror})") from None
    directory = files.shipped_directory("flags")
    shipped = {file.stem: file for file in sorted(directory.glob("*.flags"))}
    name = value.removeprefix("flags/").removesuffix(".flags")
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise UserError(f"--flagfile={value} is a directory. Pass a file of flags.")
    near = did_you_mean(Path(value).stem, shipped, prefix="--flagfile=")
    raise UserError(
        f"--flagfile={value}: no such file{near}. Pass the path of a file, or the name of a flag"
        f" file of the program: {', '.join(shipped)}"
    )


def _read_flagfile(value: str) -> list[str]:
    reader = absl_flags.FlagValues()
    path = _find_flagfile(value)
    try:
        _check_is_utf8(path)
        return reader.read_flags_from_files([f"--flagfile={path}"], force_gnu=False)
    except (absl_flags.Error, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--flagfile={path}: cannot be read ({reason})") from None


def _check_is_utf8(path: Path) -> None:
    """Raises ValueError for a file with a byte-order mark, which absl reads as part of a flag."""
    # A pipe, such as <(...) of a shell, can be read only once.
    if not path.is_file():
        return
    content = path.read_bytes()
    if files.decode_text(content).encode() != content:
        raise ValueError(
            "it begins with a byte-order mark, as files from Windows do; save it as UTF-8"
            " without one"
        )


__all__ = ["COMMON", "GROUPS", "OPTIONS", "Origin", "RunConfig", "resolve"]
