"""`hybrid-imagenet recipes`: lists the recipes, or shows the settings of one."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_imagenet import recipes
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.options import format_value

_EPILOG = """\
Examples:
  hybrid-imagenet recipes
  hybrid-imagenet recipes mlperf_lars
See what a recipe does on your number of GPUs, epoch by epoch:
  hybrid-imagenet train --recipe=mlperf_lars --print_config=all --print_config_gpus=8"""


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parser = command_line.Parser(
        "recipes",
        "Lists the recipes, which are the published training methods that --recipe of train"
        " chooses: what each does, its published result, hardware and source. With a NAME, also"
        " prints the flags that the recipe sets.",
        epilog=_EPILOG,
    )
    parser.add_argument("recipe", nargs="?", metavar="NAME", help="recipe to show (default: all)")
    name = parser.parse_args(arguments).recipe
    if name is None:
        print(recipes.table())
        return
    recipe = recipes.load(name)
    print(recipes.table([name]))
    for flag, value in recipe.overrides.items():
        print(f"  --{flag}={format_value(value)}")
