"""The search: its rounds on made-up results, the compressed schedule, and one real search on two ranks."""

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import derived, relative_step
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import schedules
from studies import trial_runs
from studies.search import command as program
from studies.search import trials
from studies.search.trials import Candidate

GRID = [Candidate("lr", lr, t) for lr in (0.1, 0.2, 0.4, 0.8) for t in (2.0, 4.0)]


def result(top1, loss=1.0):
    return trial_runs.Result(trial_runs.FINISHED, summary={"val_top1": top1, "val_loss": loss})


def test_the_better_half_goes_on_for_twice_as_long():
    """Top-1 falls with the distance from lr 0.4, T 4; 0.8 diverges."""
    asked = []

    def train(candidate, epochs):
        asked.append((candidate, epochs))
        if candidate.value == 0.8:
            return trial_runs.Result(trial_runs.DIVERGED, "the validation loss is not finite")
        return result(0.9 - abs(candidate.value - 0.4) - 0.01 * (candidate.warmup_epochs == 2))

    done = program.search(GRID, 64, train, lambda text: None)
    assert [epochs for _, epochs in asked] == [2] * 8 + [4] * 4 + [8] * 2
    assert {c for c, epochs in asked if epochs == 4} == {
        Candidate("lr", lr, t) for lr in (0.2, 0.4) for t in (2.0, 4.0)
    }
    assert {c for c, epochs in asked if epochs == 8} == {Candidate("lr", 0.4, 2.0), Candidate("lr", 0.4, 4.0)}
    assert program.choice(done).candidate == Candidate("lr", 0.4, 4.0)


def test_equal_accuracy_is_decided_by_the_loss_and_failures_are_told():
    done = program.search(GRID[:2], 2, lambda c, e: result(0.5, c.warmup_epochs), lambda text: None)
    assert program.choice(done).candidate.warmup_epochs == 2.0
    failed = trial_runs.Result(trial_runs.FAILED, "exit code 1: it broke")
    with pytest.raises(UserError, match=r"no trial of round 1 finished .*it broke"):
        program.search(GRID[:2], 2, lambda c, e: failed, lambda text: None)
    with pytest.raises(UserError, match="--budget_epochs=3: 8 candidates need 24 epochs"):
        program.search(GRID, 3, lambda c, e: failed, lambda text: None)


@pytest.mark.parametrize(
    "flags",
    [
        ["--warmup_epochs=10"],
        ["--recipe=gradual_warmup", "--warmup_epochs=9"],
        ["--optimizer=lars", "--lr_schedule=poly", "--warmup_epochs=9"],
        ["--optimizer=sgd", "--lr_schedule=cosine", "--warmup_epochs=0"],
    ],
)
def test_a_trial_has_the_schedule_of_the_run_compressed(flags):
    """Nine epochs instead of ninety; the exponential schedule steps at whole epochs, of the run and of the trial."""
    flags = [*flags, "--epochs=90"]
    run = config.resolve(flags, 4)
    short = config.resolve([*flags, *trials.flags(run, Candidate("lr", 0.3, run.warmup_epochs), 9)], 4)
    run = config.resolve([*flags, "--lr=0.3"], 4)
    whole, trial = (schedules.create(**derived.schedule_arguments(c)) for c in (run, short))
    for epoch in range(0, 90, 10 if run.lr_schedule == "exponential" else 1):
        at, then = whole(epoch, epoch + 0.1, 1024), trial(epoch / 10, (epoch + 0.1) / 10, 1024)
        assert at["phase"] == then["phase"]
        assert then["learning_rate"] == pytest.approx(at["learning_rate"], rel=1e-6)


def test_a_trial_of_mlperfs_table_keeps_the_peak_and_decay_of_the_run():
    flags = ["--recipe=mlperf_lars", "--per_gpu_batch=256"]
    run = config.resolve(flags, 24)
    candidate = trials.candidates(run)[0]
    short = config.resolve([*flags, *trials.flags(run, candidate, 11)], 24)
    assert (short.epochs, run.epochs, short.weight_decay) == (11, 43, run.weight_decay)
    assert short.warmup_epochs == pytest.approx(candidate.warmup_epochs * 11 / 43)
    assert relative_step.peak(short).value == pytest.approx(candidate.relative_step)


HYBRID = ["--hybrid_handover=continuous", "--per_gpu_batch=256", "--lr=0.1"]


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (HYBRID, "lars_eta"),
        ([*HYBRID, "--lr_decay_exponent=epoch"], "lars_eta"),
        (["--optimizer=lars", "--lr_schedule=poly", "--per_gpu_batch=256"], "lr"),
        (["--recipe=mlperf_lars", "--per_gpu_batch=256", "--warmup_epochs=4"], "lr"),
        (["--recipe=flash_a", "--per_gpu_batch=256"], "lars_eta"),
    ],
)
def test_with_lars_relative_steps_are_tried_around_the_tuned_one(flags, flag):
    """Each candidate's flags give the run the relative step that it is for, whatever sets the rate."""
    run = config.resolve(flags, 24)
    grid = trials.candidates(run)
    assert {c.flag for c in grid} == {flag}
    for candidate in grid:
        chosen = [f"--{flag}={candidate.value!r}", f"--warmup_epochs={candidate.warmup_epochs!r}"]
        top = relative_step.peak(config.resolve([*flags, *chosen], 24))
        assert top.value == pytest.approx(candidate.relative_step)
    steps = sorted({c.relative_step for c in grid})
    assert steps == pytest.approx([0.105 * (6144 / 3264) ** 0.5 * factor for factor in (0.25, 0.5, 1, 2, 4)])
    assert {c.relative_step for c in trials.candidates(run, steps=(0.3,))} == {0.3}


@pytest.mark.slow
def test_a_real_search_on_two_ranks_writes_a_flag_file(tmp_path, capsys):
    out = tmp_path / "chosen.flags"
    run = ["--dataset=digits", "--augmentation=digits", "--model=resnet8", "--model_width=8", "--stem=3x3"]
    run += ["--image_size=16", "--per_gpu_batch=64"]
    run += ["--lr=0.1", "--hybrid_handover=continuous"]
    arguments = ["--budget_epochs=2", "--relative_steps=0.02,1e7", "--warmups=1", "--ranks=2", f"--out={out}"]
    assert program.main([*arguments, "--", *run, "--epochs=4"]) == 0
    chosen = config.resolve([*run, f"--flagfile={out}"])
    assert chosen.lars_eta == pytest.approx(0.1)  # lr * N is 0.2, and the velocity an average
    assert (chosen.warmup_epochs, chosen.origins["lars_eta"]) == (1.0, config.Origin.FLAGFILE)
    text = out.read_text()
    assert "# relative step 0.02, lars_eta 0.1, T 1, 1 epochs: top-1" in text
    assert "# relative step 1e+07, lars_eta 5e+07, T 1, 1 epochs:" in text
    again = capsys.readouterr().out
    assert program.main([*arguments, "--", *run, "--epochs=4"]) == 0  # both trials are kept
    assert capsys.readouterr().out.splitlines()[-1] == again.splitlines()[-1]
