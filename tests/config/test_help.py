"""Tests the texts of --help: the basic flags, all flags, a group, and flags that contain a word."""

import shlex

import pytest

from hybrid_imagenet import config, main
from hybrid_imagenet.commands import run
from hybrid_imagenet.config import help as flag_help
from hybrid_imagenet.config.flags import CHOICES
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import SPELLING


def flag_names_in(text):
    words = text.replace("--[no]", "--").split()
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")} & set(
        config.OPTIONS
    )


def flags_of(about):
    """Returns the flags that have an entry in a text of --help."""
    lines = [line for line in flag_help.text(about).splitlines() if line.startswith("  --")]
    return flag_names_in("\n".join(lines))


def test_help_lists_the_basic_flags():
    basic = {name for name, option in config.OPTIONS.items() if option.basic}
    assert 20 <= len(basic) <= 30
    assert {
        "dataset",
        "data_dir",
        "model",
        "epochs",
        "lr",
        "weight_decay",
        "run_dir",
        "resume",
    } <= basic
    assert flags_of("") == basic
    assert f"--help=all lists all {len(config.OPTIONS)} flags" in flag_help.text()


def test_help_all_lists_every_flag_with_its_default():
    assert flags_of("all") == set(config.OPTIONS)
    assert "(default: 90 epochs)" in " ".join(flag_help.text("all").split())


def test_help_examples_are_valid_commands():
    assert len(flag_help.EXAMPLES) == 5
    for command in flag_help.EXAMPLES.values():
        program, name, *words = shlex.split(command)
        assert program == "hybrid-imagenet"
        config.resolve(run.parse_arguments(words)[1] if name == "run" else words)


@pytest.mark.parametrize(
    ("about", "found", "other"),
    [
        ("data", "val_fraction", "seed"),
        ("communication", "compression", "seed"),
        ("allreduce", "torus_grid", "seed"),
        ("optimizer", "optimizer", "seed"),
        ("smoothing", "label_smoothing", "seed"),
        ("--label-smoothing", "label_smoothing", "seed"),
        ("TensorBoard", "tensorboard", "seed"),
        ("lamb", "optimizer", "torus_grid"),
    ],
)
def test_help_of_a_group_or_a_word_lists_its_flags(about, found, other):
    assert found in flags_of(about)
    assert other not in flags_of(about)


def help_of(flag, optimizer):
    """Returns the text of a flag in --help=optimizer that is printed for an optimizer."""
    entries = flag_help.text("optimizer").split("\n  --")
    texts = [
        " ".join(entry.split()) for entry in entries if entry.removeprefix("[no]").startswith(flag)
    ]
    (result,) = [
        text for text in texts if optimizer in text.rpartition("(")[2].partition(";")[0].split(", ")
    ]
    return result


# Optimizers that the text of one optimizer must not describe. Hybrid combines AdaBound, SGD and
# LARS.
OTHER_OPTIMIZERS = {
    "hybrid": ("LAMB", "Muon"),
    "adamw": ("AdaBound", "SGD", "LARS", "LAMB", "Muon"),
    "adabound": ("SGD", "LARS", "LAMB", "Muon"),
    "sgd": ("AdaBound", "LARS", "LAMB", "Muon"),
    "lars": ("AdaBound", "SGD", "LAMB", "Muon"),
    "lamb": ("AdaBound", "SGD", "LARS", "Muon"),
    "muon": ("AdaBound", "SGD", "LARS", "LAMB"),
}


@pytest.mark.parametrize("optimizer", OTHER_OPTIMIZERS)
@pytest.mark.parametrize("flag", ["momentum=", "weight_decay="])
def test_help_of_momentum_and_decay_describes_only_the_optimizer(flag, optimizer):
    if flag.rstrip("=") not in CHOICES["optimizer"][optimizer]:
        return
    text = help_of(flag, optimizer).rpartition("(")[0]
    assert not [other for other in OTHER_OPTIMIZERS[optimizer] if other in text], text


def test_help_of_the_momentum_of_muon_describes_muon():
    assert help_of("momentum=", "muon").startswith("momentum=NUMBER Momentum of Muon: ")


@pytest.mark.parametrize("about", ["", "all"])
def test_help_says_that_dashes_and_underscores_mean_the_same(about):
    assert SPELLING in " ".join(flag_help.text(about).split())


def suggested_commands(text):
    """Returns the commands that the answer to a command without flags suggests."""
    return [line.strip() for line in text.splitlines() if line.startswith("  hybrid-imagenet ")]


def test_train_without_flags_suggests_two_commands_that_need_no_checkout(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no flags were given. Try one of these commands:\n")
    digits, photos = suggested_commands(error)
    assert photos == "hybrid-imagenet train --dataset=folder --data_dir=photos --val_fraction=0.2"
    program, name, *flags = shlex.split(digits)
    assert (program, name) == ("hybrid-imagenet", "train")
    assert config.resolve(flags).data.dataset == "digits"


@pytest.mark.parametrize("end", [[], ["--"]])
def test_run_without_flags_suggests_two_commands_with_its_own_options(end, capsys):
    assert run.main(["-np", "2", *end]) == 2
    commands = suggested_commands(capsys.readouterr().err)
    assert commands == [
        "hybrid-imagenet run -np 2 -- --flagfile=digits",
        "hybrid-imagenet run -np 2 -- --dataset=folder --data_dir=photos --val_fraction=0.2",
    ]


def test_help_of_an_unknown_word_suggests_the_nearest_flag():
    with pytest.raises(UserError, match=r"--help=epocs.*did you mean epochs"):
        flag_help.text("epocs")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_lines_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    # The usage takes the first two lines.
    lines = flag_help.text("all").splitlines()[2:]
    assert max(map(len, lines)) <= min(columns, 100)


@pytest.mark.parametrize(
    ("words", "about"),
    [([], None), (["--lr=1"], None), (["-h"], ""), (["--x", "--help"], ""), (["--help=lr"], "lr")],
)
def test_topic_is_none_without_a_request_for_help(words, about):
    assert flag_help.topic(words) == about


def test_help_of_the_topic_model_lists_the_group_of_the_network():
    assert flag_help.text("model").startswith("Model and precision.\n  --model=")


@pytest.mark.parametrize("group", ["", "all", *flag_help._groups()])
def test_help_of_each_group_lists_no_flag_twice_with_one_text(group):
    lines = flag_help.text(group).split("\n  --")
    assert len(lines) == len(set(lines))
    if group in config.COMMON:
        assert sum(line.removeprefix("[no]").startswith(f"{group}=") for line in lines) == 1
