"""Tests `hybrid-imagenet recipes`."""

from hybrid_imagenet import __main__ as program
from hybrid_imagenet import recipes


def test_recipes_lists_every_recipe(capsys):
    assert program.main(["recipes"]) == 0
    assert capsys.readouterr().out == f"{recipes.table()}\n"


def test_recipes_of_a_name_adds_the_flags_that_it_sets(capsys):
    assert program.main(["recipes", "mlperf_lars"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mlperf_lars  ")
    assert "  --optimizer=lars" in lines
    assert len(lines) == 3 + len(recipes.load("mlperf_lars").overrides)


def test_recipes_of_an_unknown_name_suggests_the_nearest(capsys):
    assert program.main(["recipes", "hybird"]) == 2
    assert "(did you mean hybrid" in capsys.readouterr().err
