"""Tests `python -m benchmarks arms`: the runner with processes that only wait, and the verdicts."""

import importlib.util
import json
import os
import time

import pytest

from benchmarks import arms, peer
from benchmarks.arms_table import ARMS, SPEED, Arm
from hybrid_imagenet import config
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.errors import UserError

MACHINE = {"gpu": "NVIDIA H200", "key": "h200", "memory_gb": 150.0, "driver": "580"}
TIMED = """
import json, time
from benchmarks.turns import wait_for_turn
wait_for_turn()
began = time.time()
time.sleep(.2)
print("scaling-result " + json.dumps(dict(images_per_second=5.0, began=began, ended=time.time())))
"""


def fake(name, program, **more):
    """Returns an arm that runs a Python program."""
    return Arm(
        name,
        ("-c", program),
        "a rule",
        lambda name, rows, machine: f"measured with {sorted(rows)}",
        (),
        **more,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(*fakes, words=("--rehearse", "--parallel=4"), minutes=1.0):
        """Runs these arms instead of the real ones; returns the rows of the JSON file by name."""
        monkeypatch.setattr(arms, "ARMS", fakes)
        assert arms.main([f"--out={tmp_path}/out", f"--minutes={minutes}", *words]) == 0
        return {
            row["arm"]: row
            for row in json.loads((tmp_path / "out" / "arms.json").read_text())["arms"]
        }

    return run


def test_arms_are_timed_one_after_the_other_and_a_failure_is_reported(run, tmp_path, capsys):
    broken = fake("broken", "print('ValueError: no kernel'); raise SystemExit(3)")
    rows = run(fake("a", TIMED), broken, fake("b", TIMED), fake("c", "pass", timed=False))
    assert [row["status"] for row in rows.values()] == [
        "measured",
        "failed",
        "measured",
        "measured",
    ]
    assert rows["broken"]["verdict"] == "failed: code 3: ValueError: no kernel"
    spans = sorted((rows[name]["began"], rows[name]["ended"]) for name in "ab")
    assert spans[0][1] <= spans[1][0]
    text = (tmp_path / "out" / "arms.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| a | 5.0 |" in text


def test_arms_at_the_end_of_minutes_are_cut_or_reported_as_not_run(run, monkeypatch):
    monkeypatch.setattr(arms, "_RESERVED_SECONDS", 0.0)
    began = time.monotonic()
    rows = run(
        fake("hangs", "import time; time.sleep(60)", exclusive=True),
        fake("later", "pass"),
        minutes=2 / 60,
    )
    assert time.monotonic() - began < 10
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "hangs": "not run: cut at the end of --minutes", "later": "not run"}  # fmt: skip


def test_arm_that_never_gets_ready_is_cut_and_the_others_are_measured(run):
    rows = run(
        fake("hangs", "import time; time.sleep(60)", seconds=1.0),
        fake("a", TIMED),
        words=["--rehearse"],
    )
    assert [row["status"] for row in rows.values()] == ["cut", "measured"]


def test_arms_started_again_run_only_what_is_missing(run, tmp_path):
    once = f"import pathlib; pathlib.Path('{tmp_path}/once').mkdir()"
    rows = run(fake("once", once, exclusive=True), fake("data", "'{fashion}'"))
    assert rows["data"]["verdict"] == "not run: needs --fashion_mnist=DIR"
    rows = run(
        fake("once", once),
        fake("data", "'{fashion}'"),
        words=["--rehearse", "--fashion_mnist=/data"],
    )
    assert [row["status"] for row in rows.values()] == ["measured", "measured"]
    rows = run(
        fake("once", once), fake("data", "pass"), words=["--rehearse", "--remeasure", "--only=once"]
    )
    assert [row["status"] for row in rows.values()] == ["failed", "measured"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"skipped": "JAX is absent. Pass --python."}, "JAX is absent"),
        ({"peers": {}}, "the peer is not installed"),
    ],
)
def test_skipped_arm_is_not_run_and_is_repeated_by_the_next_start(run, tmp_path, row, reason):
    # Words of a command line are templates.
    text = json.dumps(row).replace("{", "{{").replace("}", "}}")
    program = f"open('{tmp_path}/out/jax/row.json', 'w').write('{text}')"
    first = run(fake("jax", program))["jax"]
    assert first["status"] == "not run"
    assert first["verdict"] == f"not run: {reason}; pass --peer_python"
    assert run(fake("jax", "pass"))["jax"]["status"] == "measured"


def test_arm_that_failed_is_repeated_after_the_others(run, tmp_path):
    run(fake("x", "raise SystemExit(3)"))
    x, y = (
        fake(name, f"open('{tmp_path}/order', 'a').write('{name}')", exclusive=True)
        for name in "xy"
    )
    assert [row["status"] for row in run(x, y).values()] == ["measured", "measured"]
    assert (tmp_path / "order").read_text() == "yx"


def test_gpu_that_does_not_report_its_memory_counts_as_zero_gigabytes(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, [N/A], [N/A], 580.1'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    expected = {"gpu": "NVIDIA H100 80GB HBM3", "key": "h100", "memory_gb": 0.0, "driver": "580.1"}
    assert arms._machine() == expected


def test_table_is_complete_while_an_arm_runs(run, tmp_path):
    # A later arm reads the table as it would remain if the benchmark were killed at this moment.
    reads = (
        "import pathlib; print('scaling-result',"
        f" pathlib.Path('{tmp_path}/out/arms.json').read_text())"
    )
    rows = run(fake("first", "pass", exclusive=True), fake("reads", reads))
    assert [row["status"] for row in rows["reads"]["arms"]] == ["measured", "not run"]


def test_arms_run_at_the_same_time_only_if_they_fit_into_memory():
    options = arms._parser().parse_args(["--parallel=8"])
    others = [
        fake("a", "", gigabytes=60),
        fake("b", "", gigabytes=60),
        fake("c", ""),
        fake("d", "", timed=False),
    ]
    assert [arm.name for arm in arms._wave(others, options, 100)] == ["a", "c"]
    assert [
        arm.name for arm in arms._wave([fake("x", "", exclusive=True), *others], options, 1000)
    ] == ["x"]


BASE = {
    "images_per_second": 5000.0,
    "steps_ahead": 0.95,
    "first_loss": 7.0,
    "first_seconds": 38.0,
    "exposed_seconds": 0.002,
    "val_top1": 0.95,
}


@pytest.fixture
def verdict(tmp_path):
    def verdict(name, **rows):
        """Returns the verdict of the table on an arm if these rows were measured."""
        table = arms.Table(tmp_path, ARMS, MACHINE)
        table.rows = {key: row | {"status": arms.MEASURED} for key, row in rows.items()}
        return table.verdict({arm.name: arm for arm in ARMS}[name])

    return verdict


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("base", {}, "63% of the published 7,950 images/s"),
        ("base", {}, "the host is 0.95 steps ahead"),
        ("base", {"steps_ahead": 0.02}, "it waits for the device"),
        ("onednn", {"images_per_second": 5150.0}, "yes: 1.030 times base"),
        ("onednn", {"images_per_second": 5050.0}, "no: 1.010 times base"),
        (
            "onednn",
            {"images_per_second": 5150.0, "first_loss": 7.1},
            "no: losses are 1.4e-02 apart",
        ),
        ("jit_compile", {"images_per_second": 5100.0}, "no: 1.020"),
        ("jit_compile", {"images_per_second": 5160.0}, "yes: 1.032"),
        ("again", {"images_per_second": 4950.0}, "0.990 times base"),
        (
            "loop",
            {"ratio": 0.98, "validation": {"share_of_training": 0.3}},
            "yes: 98.0% of the step",
        ),
        (
            "loop",
            {"ratio": 0.96, "validation": {"share_of_training": 0.3}},
            "no: 96.0% of the step",
        ),
        (
            "ranks2_tensorflow",
            {"exposed_seconds": 0.001},
            "yes: 1.0 ms exposed, 2.0 ms exposed with ranks2",
        ),
        ("ranks2_tensorflow", {"exposed_seconds": 0.004}, "no: 4.0 ms exposed"),
        ("digits_gpu", {"val_top1": 0.94}, "yes: top-1 94.00%, 1.00 points from digits_cpu"),
        ("digits_gpu", {"val_top1": 0.92}, "no: top-1 92.00%"),
        (
            "torch_compiled",
            {"peers": {"torch_compiled": {"images_per_second": 4000.0, "ratio": 1.25}}},
            "1.25 times",
        ),
        ("stem", {"images_per_second": 5060.0}, "yes: 1.012 times base"),
        ("jax_full", {"images_per_second": 4900.0}, "jit_stem is 1.020 times as fast"),
        ("jit_cached", {"first_seconds": 9.0}, "first steps 9.0 s, 38.0 s with jit_cache"),
    ],
)
def test_verdict_follows_the_rule_of_the_arm(verdict, name, row, expected):
    text = verdict(
        name,
        **(
            dict.fromkeys(("base", "ranks2", "digits_cpu", "jit_stem", "jit_cache"), BASE)
            | {name: BASE | row}
        ),
    )
    assert expected in text
    assert "as expected" not in text


def test_verdict_on_a_gain_within_the_noise_is_no_verdict(verdict):
    rows = {"base": BASE, "onednn": BASE | {"images_per_second": 5150.0}}
    assert verdict("onednn", **rows, again=BASE | {"images_per_second": 4750.0}).startswith(
        "no verdict: 1.030 times"
    )
    assert verdict("onednn", **rows, again=BASE | {"images_per_second": 4950.0}).startswith(
        "yes: 1.030 times"
    )


def test_verdict_without_the_arm_to_compare_with_is_no_verdict(verdict):
    assert verdict("onednn", onednn=BASE) == "no verdict: base was not measured"


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_command_of_each_arm_is_accepted(arm, tmp_path):
    options = arms._parser().parse_args([f"--fashion_mnist={tmp_path}"])
    words = arm.command(tmp_path, options)
    assert not any("{" in word for word in words)
    places = [index for index, word in enumerate(words) if word.endswith(".scaling_in_turn")]
    if places:
        arguments = words[places[0] + 1 :]
        # The launcher of several ranks has a separator of its own.
        if arguments[0] == "--":
            arguments = arguments[1:]
        options_of_rank, flags = scaling.split_arguments(arguments)
        scaling.make_parser().parse_args(options_of_rank)
        assert flags[0] == "--dataset=synthetic_tensors"
        config.resolve(flags)
    elif "hybrid_imagenet.main" in words:
        config.resolve(words[2:])


def test_arms_with_invalid_options_or_a_damaged_table_raise(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"there is no nothing.* Choose from speed, "):
        arms.main(["--only=nothing"])
    monkeypatch.setattr(arms.gpus, "count", lambda: 0)
    with pytest.raises(UserError, match="Add --rehearse to try"):
        arms.main([f"--out={tmp_path}"])
    (tmp_path / "arms.json").write_text("{")
    with pytest.raises(UserError, match="cannot be used"):
        arms.main([f"--out={tmp_path}", "--rehearse"])


def test_environment_of_an_arm_may_refer_to_the_output_directory(run, tmp_path):
    program = f"import os; open('{tmp_path}/found', 'w').write(os.environ['CACHE'])"
    run(fake("cached", program, environment=(("CACHE", "{out}/cache"),)))
    assert (tmp_path / "found").read_text() == f"{tmp_path}/out/cache"


def test_only_speed_chooses_the_arms_in_the_order_of_speed_after_what_they_are_compared_with():
    options = arms._parser().parse_args(["--only=speed", "--rehearse"])
    chosen = arms._chosen(options)
    assert [arm.name for arm in chosen] == list(SPEED)
    for place, arm in enumerate(chosen):
        assert arm.baseline in ("", *SPEED[:place])


def test_cache_of_xla_has_a_directory_for_each_gpu_driver_and_software(run, monkeypatch, tmp_path):
    program = f"import os; open('{tmp_path}/out/names', 'a').write(os.environ['CACHE'] + ' ')"
    monkeypatch.setattr(arms.importlib.metadata, "version", lambda package: "2.21")
    for gpu, driver in (("NVIDIA H200", "580.1"), ("NVIDIA A100", "580.1"), ("NVIDIA A100", "590")):
        monkeypatch.setattr(
            arms, "_machine", lambda g=gpu, d=driver: MACHINE | {"gpu": g, "driver": d}
        )
        run(
            fake("cached", program, environment=(("CACHE", "{software}"),)),
            words=["--rehearse", "--remeasure"],
        )
    names = (tmp_path / "out" / "names").read_text().split()
    assert len(set(names)) == 3
    packages = "tensorflow2.21-tensorflow-cpu2.21-nvidia-cudnn-cu122.21"
    assert names[0] == f"NVIDIA-H200-driver580.1-{packages}"


def test_peer_without_jax_is_skipped_with_a_message(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--peer=jax_full", "--batch=1", "--image_size=32", f"--json={tmp_path}/row.json"]
    assert peer.main(words) == 0
    assert "JAX is not installed" in json.loads((tmp_path / "row.json").read_text())["skipped"]


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.words[0] == "-m"], ids=lambda a: a.name)
def test_arm_runs_a_module_that_exists(arm):
    assert importlib.util.find_spec(arm.words[1])
