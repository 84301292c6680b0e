"""Tests the flags that only some choices have, such as those of an optimizer.

They are declared once, rejected with other choices, and passed on by name.
"""

import dataclasses
import os
import pathlib
import re
import threading

import pytest

from hybrid_imagenet import config, files, optimizers, print_config, run_plan
from hybrid_imagenet.comm.settings import CommunicationSettings, SizeOptions
from hybrid_imagenet.config import flag_checks, flags
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import options_of
from hybrid_imagenet.schedules import training_schedule

# For each type, a function that returns another value than the default.
CHANGED_VALUES = {
    bool: lambda default: not default,
    float: lambda default: (default or 0.0) / 2 or 0.25,
    str: lambda default: "2x1",
    int: lambda default: default + 1,
}


def changed_value(option):
    """Returns a valid value that is not the default."""
    if option.choices:
        return next(c for c in option.choices if c != option.default)
    if option.kind.repeated:
        return (1.0, 2.0)
    return CHANGED_VALUES[option.kind.base](option.default)


def select(name):
    """Returns flags that choose an optimizer, with a learning rate if it has no default."""
    rate = OPTIMIZERS[name].example_rate
    return [f"--optimizer={name}", *([] if rate is None else [f"--lr={rate}"])]


def flags_for(options):
    """Returns flags that set other values than the defaults, and these values by flag."""
    values = {flag: changed_value(option) for flag, option in options.items()}
    arguments = []
    for flag, value in values.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else value
        arguments.append(f"--{flag}={text}")
    return arguments, values


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flags_of_an_optimizer_reach_its_constructor_and_its_configuration(name):
    constructor_options = options_of(OPTIMIZERS[name].options)
    arguments, values = flags_for(
        {flag: OPTIMIZERS[name].flags[flag] for flag in constructor_options}
    )
    # With 256 images in all, decoupled weight decay is not scaled.
    batch = "--per_gpu_batch=128"
    resolved = config.resolve([*select(name), batch, *arguments], 2)
    planned = run_plan.make(resolved).optimizer
    optimizer = planned.create()
    assert planned.name == optimizer.name == name
    result = optimizer.get_config()
    assert {flag: result[constructor_options[flag].name] for flag in values} == values
    arguments = dataclasses.asdict(planned.options) | {"name": name}
    assert {key: result[key] for key in arguments} == arguments
    assert type(optimizer).from_config(result).get_config() == result


@pytest.mark.parametrize("name", ["lars", "hybrid"])
def test_lars_eta_has_a_default_as_a_flag_but_not_in_the_class(name):
    option = OPTIMIZERS[name].flags["lars_eta"]
    assert (option.default, option.kind.optional) == (0.001, False)
    assert optimizers.create(name).trust_coefficient is None


def test_weight_decay_by_default_is_zero_in_classes_but_not_in_runs():
    for name, method in OPTIMIZERS.items():
        # As in Keras, only AdamW has a default other than 0.
        class_default = 0.004 if name == "adamw" else 0.0
        assert optimizers.create(name).get_config()["weight_decay"] == class_default
        assert config.resolve(select(name)).get("weight_decay") == method.weight_decay > 0


@pytest.mark.parametrize("arguments", [[], ["--recipe=gradual_warmup"]])
def test_adamw_without_a_learning_rate_is_rejected_and_the_error_suggests_one(arguments):
    message = r"0\.1 is that of SGD\. Add --lr=0\.001 --lr_scaling=none\."
    with pytest.raises(UserError, match=message):
        config.resolve([*arguments, "--optimizer=adamw"])
    resolved = config.resolve(
        [*arguments, "--optimizer=adamw", "--lr=0.001", "--lr_scaling=none"], 8
    )
    options = run_plan.make(resolved).optimizer.options
    assert (options.learning_rate, options.weight_decay) == (0.001, 0.05)


@pytest.mark.parametrize("schedule", ["flash_a", "mlperf"])
def test_adamw_with_a_schedule_that_has_rates_of_sgd_is_rejected(schedule):
    with pytest.raises(UserError, match=f"--lr_schedule={schedule} .* --optimizer=adamw"):
        config.resolve(["--optimizer=adamw", f"--lr_schedule={schedule}"])


@pytest.mark.parametrize("name", training_schedule.SCHEDULES)
def test_flags_of_a_schedule_change_its_learning_rates(name):
    base = ["--optimizer=sgd", f"--lr_schedule={name}", "--warmup_epochs=5"]

    def rates(*flags_to_add):
        schedule = run_plan.make(config.resolve([*base, *flags_to_add], 2)).schedule.values
        return [schedule(e / 2, e / 2, 512)["learning_rate"] for e in range(180)]

    for flag in flags_for(flags.CHOICES["lr_schedule"][name])[0]:
        assert rates(flag) != rates(), flag


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flags_of_an_optimizer_outside_its_class_change_the_schedule_or_the_rate(name):
    constructor_options = options_of(OPTIMIZERS[name].options)
    options = {
        flag: option
        for flag, option in OPTIMIZERS[name].flags.items()
        if flag not in constructor_options
    }

    def evaluate(*flags_to_add):
        # Higher than the default start of a linear warmup.
        rate = f"--{OPTIMIZERS[name].rate}=0.2"
        resolved = config.resolve([f"--optimizer={name}", rate, *flags_to_add], 2)
        schedule = run_plan.make(resolved).schedule.values
        values = [tuple(schedule(e / 2, e / 2 + 0.25, 1024).values()) for e in range(40)]
        return values, run_plan.make(resolved).optimizer.options

    assert options
    for flag in flags_for(options)[0]:
        assert evaluate(flag) != evaluate(), flag


def test_flags_of_communication_become_its_settings():
    values = ["--allreduce=size_switched", "--size_switch_kb=3", "--deterministic"]
    expected = CommunicationSettings(
        allreduce="size_switched",
        options=SizeOptions(size_switch_kb=3),
        deterministic=True,
    )
    assert run_plan.make(config.resolve(values)).communication == expected


def test_options_have_one_selecting_flag_one_type_and_a_help_text():
    names = [
        name
        for values in flags.CHOICES.values()
        for name in {n for options in values.values() for n in options}
    ]
    assert len(names) == len(set(names))
    assert not set(names) & set(config.COMMON)
    for values in flags.CHOICES.values():
        for options in values.values():
            for name, option in options.items():
                assert option.help
                assert option.kind == config.OPTIONS[name].kind


REJECTED = [
    (
        ["--sgd_nesterov"],
        "--sgd_nesterov cannot be combined with --optimizer=hybrid. Omit it, or use --optimizer=",
    ),
    (
        ["--optimizer=sgd", "--lars_eta=0.1"],
        "--lars_eta cannot be combined with --optimizer=sgd.* --optimizer=hybrid or lars",
    ),
    (
        ["--optimizer=adabound", "--momentum=0.8"],
        "--momentum cannot be combined with --optimizer=adabound",
    ),
    (
        ["--optimizer=adabound", "--adabound_lr=0"],
        "--adabound_lr=0 is not valid. Use a value above 0.",
    ),
    (
        ["--optimizer=adabound", "--adabound_gamma=0"],
        "--adabound_gamma=0 is not valid. Use a value above 0.",
    ),
    (
        ["--lr_steps=3"],
        "--lr_steps cannot be combined with --lr_schedule=exponential. Omit it, or use"
        " --lr_schedule=step",
    ),
    (["--recipe=hal", "--lr_decay=0.8"], "--lr_decay cannot be combined with --lr_schedule=step"),
    (["--lars_eps_rule=ceiling"], "--lars_eps_rule=ceiling is not valid. Choose one of add, floor"),
    (
        ["--torus_grid=2x2"],
        "--torus_grid cannot be combined with --allreduce=ring. Omit it, or use --allreduce=torus",
    ),
    (
        ["--allreduce=torus", "--size_switch_kb=1"],
        "--size_switch_kb cannot be combined with --allreduce=torus",
    ),
    (
        ["--allreduce=size_switched", "--size_switch_kb=-1"],
        "--size_switch_kb=-1 is not valid. Use a value of at least 0.",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
def test_flag_of_another_choice_on_the_command_line_is_rejected(arguments, message):
    with pytest.raises(UserError, match=message):
        config.resolve(arguments)


def test_flag_of_another_choice_in_a_flag_file_is_ignored(tmp_path):
    flagfile = tmp_path / "some.flags"
    flagfile.write_text("--allreduce=torus\n--torus_grid=2x1\n")
    resolved = config.resolve([f"--flagfile={flagfile}", "--allreduce=ring"], 2)
    assert "torus_grid" not in resolved.as_dict()
    assert "torus_grid" not in resolved.as_dict()
    text = print_config.describe(resolved, 20000)
    assert "torus_grid" in text
    assert "not used: flagfile has 2x1, but --allreduce=ring has no --torus_grid" in text
    assert config.resolve([f"--flagfile={flagfile}"]).get("torus_grid") == "2x1"


def test_recipe_after_the_flag_file_of_another_method_ignores_flags_of_that_method(monkeypatch):
    # `launch/local.sh --recipe=hal` resolves the same flags.
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    resolved = config.resolve(["--flagfile=flags/digits.flags", "--recipe=hal"], 2)
    assert set(resolved.dropped) == {"lr_decay", "lars_eta"}
    text = print_config.describe(resolved, 1500)
    assert "not used: flagfile has 0.02, but --optimizer=sgd has no --lars_eta" in text
    assert run_plan.make(resolved).optimizer.name == "sgd"


def test_tilde_in_paths_is_expanded_also_in_a_flag_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/a")
    (tmp_path / "flags").write_text("--run_dir=~/runs\n")
    resolved = config.resolve(
        [f"--flagfile={tmp_path}/flags", "--init-from=~/x", "--data_dir=~no-one/x"]
    )
    assert (resolved.run.run_dir, resolved.network.init_from) == ("/home/a/runs", "/home/a/x")
    assert resolved.data.data_dir == "~no-one/x"
    assert datasets.DatasetRequest("folder", "~/x").directory == pathlib.Path("/home/a/x")


@pytest.mark.parametrize(
    "target",
    [
        "no_such_module_anywhere:net",
        "own_package.absent:net",
        "own_package.nets.deeper:net",
        ":net",
    ],
)
def test_own_network_module_is_found_without_importing_it(target, tmp_path, monkeypatch):
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "nets.py").write_text("import no_such_module\ndef small(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert flag_checks.find_network_module("own_package.nets:small") == str(folder / "nets.py")
    with pytest.raises(UserError, match=rf"--model={target}: there is no such module\."):
        flag_checks.find_network_module(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=keras:vgg16"], r"no network 'vgg16' \(did you mean keras:VGG16\?\)"),
        *(
            (["--model=keras:VGG16", flag], f"{flag.partition('=')[0]}=.*--model=keras:VGG16\\.$")
            for flag in (
                *("--stem=3x3", "--model_width=8", "--blurpool", "--virtual_gpus=2"),
                *("--batch_norm=last", "--zero_last_gamma", "--sync_batch_norm", "--bn_group=2"),
                *("--ema_decay=0.9", "--eval_image_size=64", "--initializer=xavier"),
            )
        ),
    ],
)
def test_keras_network_with_a_wrong_name_or_flags_of_built_in_networks_is_an_error(
    arguments, message
):
    with pytest.raises(UserError, match=message):
        config.resolve(["--dataset=synthetic", *arguments], 2)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_flagfile_with_a_byte_order_mark_is_rejected(encoding, tmp_path):
    path = tmp_path / "windows.flags"
    path.write_text("--epochs=3\n", encoding)
    with pytest.raises(
        UserError,
        match=r"windows.flags: cannot be read \(it begins with a byte-order mark.*save it as",
    ):
        config.resolve([f"--flagfile={path}"])


def test_flagfile_from_a_pipe_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("--epochs=3\n",))
    writer.start()
    assert config.resolve([f"--flagfile={pipe}"]).run.epochs == 3
    writer.join()


@pytest.mark.parametrize("name", ["digits", "digits.flags", "flags/digits.flags"])
def test_flagfile_by_name_is_that_of_the_program_in_any_directory(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert config.resolve([f"--flagfile={name}"]).data.dataset == "digits"


def test_flagfile_by_name_is_found_where_pip_installs_it(monkeypatch, tmp_path):
    installed = tmp_path / "site-packages" / "hybrid_imagenet"
    (installed / "flags").mkdir(parents=True)
    (installed / "flags" / "digits.flags").write_text("--epochs=3\n")
    monkeypatch.setattr(files, "__file__", str(installed / "files.py"))
    assert config.resolve(["--flagfile=digits"]).run.epochs == 3


def test_flagfile_in_the_current_directory_is_preferred(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("--epochs=3\n")
    assert config.resolve(["--flagfile=digits"]).run.epochs == 3


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("digit", " (did you mean --flagfile=digits?)"),
        ("flags/digit.flags", " (did you mean --flagfile=digits?)"),
        ("elsewhere/digits.flags", " (did you mean --flagfile=digits?)"),
        ("mine", ""),
    ],
)
def test_flagfile_that_is_missing_is_an_error_with_all_names(name, suggestion):
    expected = (
        f"--flagfile={name}: no such file{suggestion}. Pass the path of a file, or the name of a"
        " flag file of the program: cluster1, cluster2, digits, fashion_mnist"
    )
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        config.resolve([f"--flagfile={name}"])


def test_flagfile_that_is_a_directory_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"^--flagfile=.* is a directory\. Pass a file of flags\."):
        config.resolve([f"--flagfile={tmp_path}"])
