"""Finds the settings with which a run continues when it is resumed.

The rule of --resume:

1. A flag on the command line, or in a flag file on it, has the value that is given there.
2. Every other flag keeps the value that the run has, whether somebody set it or it was a default.
   A default or a recipe that has changed since therefore does not act on the run.
3. Flags whose values follow from the batch, the data, the hardware or the number of ranks are
   derived again. Five settings are kept nevertheless, because they define the run: its number of
   epochs, its row of MLPerf's table, the images per GPU, the order of its images, and what XLA
   compiles.
4. Only flags are kept. All other numbers are in the plan of the run (`run_plan`), which is made
   again for the ranks of this start. `training.preflight` prints where it differs from the plan of
   the flags in config.json.

Two consequences: A recipe other than the run's counts as its flags on the command line, and the
values of the run's recipe are then dropped. The options of an optimizer, schedule or all-reduce
are kept only as long as that one is chosen.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.cluster.environment import read_placement
from hybrid_imagenet.config import stored
from hybrid_imagenet.config.flags import CHOICES, COMMON, OPTIONS, default_values
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import Origin, check_value, format_value
from hybrid_imagenet.runlog import run_dir

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

FLAGS_OF_ONE_START = (
    "run_dir",
    "resume",
    "max_steps",
    "print_config",
    "print_config_all",
    "print_config_gpus",
    "check_only",
)
"""Flags that apply to one start of a run, and not to the next."""

MLPERF_ROW = ("lr_scaling", "warmup_epochs", "warmup_start_lr", "momentum", "weight_decay")
"""Values of MLPerf's table that a run keeps on any number of ranks.

The learning rate of the table is not among them, because it follows the batch.
"""
DECIDED_ONCE = ("jit_compile", "jit_stem")
"""Flags that are decided at the first start on a GPU."""
_KEPT_THOUGH_DERIVED = (
    *MLPERF_ROW,
    *DECIDED_ONCE,
    "epochs",
    "shuffle_window",
    "per_gpu_batch",
)

# config.json has this instead of a password.
SECRET_MASK = "***"

# The origin of a value in config.json, and its origin in the configuration of the resumed run.
# Values from the batch, the data and the hardware are derived again.
_ORIGINS = {
    Origin.COMMAND_LINE.value: Origin.EARLIER_START,
    Origin.FLAGFILE.value: Origin.EARLIER_START,
    Origin.EARLIER_START.value: Origin.EARLIER_START,
    Origin.RECIPE.value: Origin.RECIPE,
    Origin.BATCH.value: Origin.BATCH,
    Origin.DATA.value: Origin.DATA,
    Origin.HARDWARE.value: Origin.HARDWARE,
}


@dataclasses.dataclass(frozen=True)
class ResumedRun:
    """The stored settings of a run that continues.

    Attributes:
      path: Its config.json.
      flags: The value of each flag, as JSON has it.
      origins: What had set each value.
    """

    path: pathlib.Path
    flags: Mapping[str, Any]
    origins: Mapping[str, str]

    @property
    def recipe(self) -> str | None:
        """The recipe of the run, if the file has one."""
        recipe = self.flags.get("recipe")
        return recipe if isinstance(recipe, str) else None

    def check_known(self) -> None:
        """Raises UserError for a flag that does not exist."""
        for name, value in self.flags.items():
            if name not in OPTIONS:
                raise UserError(
                    f"{self.path} has the flag {name}={format_value(value)}, which does not exist."
                    " Remove it from the file to continue the run without it."
                )

    def kept(
        self, recipe: str, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Origin]]:
        """Returns the values with which the run continues where the command line sets none.

        Args:
          recipe: The recipe of this start.
          given: Values on the command line and in flag files; only the choices of an optimizer,
            schedule and all-reduce matter.

        Returns:
          The values by flag, and what has set each.

        Raises:
          UserError: If a value is not possible any more, or a password was not stored.
        """
        other_recipe = self.recipe not in (None, recipe)
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        for name in self._kept_names(given):
            stored_origin = self.origins.get(name, "")
            if other_recipe and stored_origin == Origin.RECIPE.value:
                continue
            value = self._value(name)
            origin = _ORIGINS.get(stored_origin, Origin.RUN)
            is_derived = origin in (Origin.BATCH, Origin.DATA, Origin.HARDWARE)
            if name in _KEPT_THOUGH_DERIVED and is_derived:
                origin = Origin.RUN
            if origin in (Origin.DATA, Origin.HARDWARE):
                continue
            values[name] = value
            origins[name] = origin
        choices = {
            flag: given.get(flag, values.get(flag, COMMON[flag].default)) for flag in CHOICES
        }
        for flag, choice in choices.items():
            if choice != self.flags.get(flag):
                for name in CHOICES[flag].get(str(self.flags.get(flag)), ()):
                    values.pop(name, None)
                    origins.pop(name, None)
        defaults = default_values(choices)
        for name, value in values.items():
            self._check(name, value)
            was_default = self.origins.get(name) == Origin.DEFAULT.value
            if was_default and name in defaults and value == defaults[name]:
                origins[name] = Origin.DEFAULT
        return values, origins

    def _kept_names(self, given: Mapping[str, Any]) -> list[str]:
        not_kept = {*FLAGS_OF_ONE_START, "recipe", *given}
        return [name for name in self.flags if name in OPTIONS and name not in not_kept]

    def _value(self, name: str) -> Any:
        value = self.flags[name]
        if name == "shuffle_window":
            # None stands for the window of the data's kind, which may be at a URL now.
            return value or 0
        return tuple(value) if isinstance(value, list) else value

    def _check(self, name: str, value: Any) -> None:
        if isinstance(value, str) and SECRET_MASK in value:
            raise UserError(
                f"--{name}={value} cannot be used again, because passwords are not stored. Pass the"
                " flag again."
            )
        try:
            check_value(name, value, OPTIONS[name])
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def changed_defaults(
        self, config: RunConfig, overrides: Mapping[str, Any], per_gpu_batch: int
    ) -> tuple[str, ...]:
        """Describes each kept value that was never set and that a new run would not have.

        Args:
          config: The resumed run.
          overrides: Values of its recipe.
          per_gpu_batch: Default of a new run on this machine.
        """
        choices = {flag: config.get(flag) for flag in CHOICES}
        new_run = {**default_values(choices), "per_gpu_batch": per_gpu_batch, **overrides}
        not_asked = (Origin.DEFAULT.value, Origin.HARDWARE.value, Origin.RECIPE.value)
        lines = []
        for name, value in config.as_dict().items():
            is_kept = config.origins[name] in (Origin.RUN, Origin.RECIPE, Origin.DEFAULT)
            has_no_default = name == "shuffle_window" or name in DECIDED_ONCE
            is_noted = is_kept and self.origins.get(name) in not_asked and not has_no_default
            if is_noted and value != new_run[name]:
                lines.append(
                    f"--{name}={format_value(value)} is kept from the run. A new run would have"
                    f" {format_value(new_run[name])}."
                )
        return tuple(lines)


def find(
    dataset: str, recipe: str | None, run_dir_flag: str | None, default_recipe: str
) -> ResumedRun | None:
    """Finds the run that --resume continues.

    Args:
      dataset: --dataset.
      recipe: --recipe, or None if it is not given.
      run_dir_flag: --run_dir, or None if it is not given.
      default_recipe: The recipe of a new run.

    Returns:
      The run; None if there is none, as on hosts that do not see its directory.

    Raises:
      UserError: On rank 0, if the config.json of the run cannot be read.
    """
    # Without --run_dir the directory is named after the recipe.
    name = recipe or default_recipe
    directory = run_dir.choose_directory(run_dir_flag, name, dataset, resume=True)
    if not (directory / "config.json").exists():
        return None
    try:
        return _load(directory)
    except UserError:
        # Only rank 0 needs the directory. On another host, an old one may have its path.
        if read_placement().rank == 0:
            raise
        return None


def _load(directory: pathlib.Path) -> ResumedRun:
    content = stored.read(directory)
    return ResumedRun(directory / "config.json", content["flags"], content["origins"])
