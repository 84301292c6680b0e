"""Flags for what is run, for how long, where results go, and how the run behaves on the machine."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option


@dataclasses.dataclass(frozen=True)
class Run:
    """Run and results."""

    recipe: str = option(
        "hybrid", "Named set of defaults, one per published method; `list` prints them all.", basic=True
    )
    run_dir: str | None = option(None, "Directory for results; default runs/<recipe>-<dataset>.", basic=True)
    print_config: bool = option(
        False, "Print every setting, what set it, and the schedule by epoch; then exit.", basic=True
    )
    print_config_gpus: int | None = option(
        None, "Number of GPUs for --print_config; default those started.", unit="GPUs", minimum=1
    )
    check_only: bool = option(
        False,
        "Check flags, data, run directory and checkpoint, print what was checked, and exit: 0 if the run can start, "
        "else 2 with one line.",
        basic=True,
    )
    resume: bool = option(
        False,
        "Continue the run in --run_dir from its newest good checkpoint; without a run there, start one.",
        basic=True,
    )
    epochs: float = option(
        90,
        "Passes over the training set, which schedules span; 0.5 is half a pass.",
        unit="epochs",
        above=0,
        maximum=1e6,
        whole=True,
        basic=True,
    )
    max_steps: int | None = option(
        None,
        "Stop after this many steps of the run, with a validation and a checkpoint. Schedules still span --epochs.",
        unit="steps",
        minimum=1,
    )
    stop_at_top1: float | None = option(
        None, "Stop after the validation that reaches this top-1 accuracy (a fraction).", minimum=0, maximum=1
    )
    seed: int = option(0, "Seed of initialization, data order and augmentation.", minimum=0, basic=True)
    deterministic: bool = option(False, "Bitwise repeatable runs; slower.")
    log_every_steps: int = option(
        20, "Steps between fetches of the training metrics from the device.", unit="steps", minimum=1
    )
    stall_timeout: float = option(
        300.0,
        "End the job after this time without progress; a hung rank is named before. 0 disables.",
        unit="s",
        minimum=0,
    )
    progress: str = option(
        "auto",
        "How rank 0 shows progress: a live area on a terminal, plain lines elsewhere.",
        choices=("auto", "live", "plain", "none"),
    )
    tensorboard: bool = option(False, "Write TensorBoard events to RUN_DIR/tensorboard.", basic=True)
    profile_steps: tuple[int, ...] = option(
        (), "First and last step to profile, as in 10,20: a trace and a table of times in RUN_DIR/profile.", minimum=1
    )
    tracker: str = option(
        "none", "Also send metrics to this experiment tracker, if installed.", choices=("none", "wandb", "mlflow")
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluation and checkpoints."""

    eval_every_epochs: float = option(
        1, "Epochs between validations; 0.5 is twice in each.", unit="epochs", above=0, maximum=1e6, whole=True
    )
    eval_offset_epochs: float = option(
        0,
        "Epochs after which --eval_every_epochs counts. With an interval of 4 and an offset of 3, epochs 7, 11, ...",
        unit="epochs",
        minimum=0,
        maximum=1e6,
        whole=True,
    )
    eval_batch: int | None = option(None, "Validation images per GPU and step; default the training batch.", minimum=1)
    eval_image_size: int | None = option(
        None, "Side of validation images; default --image_size.", unit="pixels", minimum=8
    )
    eval_flip: bool = option(
        False, "Validate by the mean of the scores of an image and of its mirror image; twice the work."
    )
    save_image_results: bool = option(
        False, "Write which images the last validation got right, to RUN_DIR/image_results.npy: bool, one per image."
    )
    target_top1: tuple[float, ...] = option(
        (0.75, 0.759),
        "Top-1 fractions whose epoch and time are reported.",
        minimum=0,
        maximum=1,
        basic=True,
    )
    single_gpu_throughput: str | None = option(
        None, "Images per second of one GPU alone, or a run directory with one rank: the measure of scaling efficiency."
    )
    checkpoint_every_epochs: float = option(
        1, "Epochs between checkpoints; 0.5 is twice in each.", unit="epochs", above=0, maximum=1e6, whole=True
    )
    checkpoint_every_steps: int | None = option(None, "Also save after this many steps.", unit="steps", minimum=1)
    checkpoint_every_seconds: float | None = option(None, "Also save after this time.", unit="s", minimum=1)
    keep_checkpoints: int = option(2, "Newest good checkpoints that stay on disk.", minimum=1)
    keep_best: bool = option(True, "Save each best epoch, and keep the one with the best validation top-1 too.")
