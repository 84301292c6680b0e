"""Knows the flags of other training programs, so that one typed out of habit is answered with ours.

The names are those of Keras (`Model.fit`, `Model.compile`), of timm's `train.py` and of torchvision's
`references/classification/train.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Their name, without dashes and underscores, to our flag; with "=VALUE" where their flag has no value that fits.
FOREIGN = {
    # Keras
    "batchsize": "per_gpu_batch",
    "learningrate": "lr",
    "initiallearningrate": "lr",
    "validationsplit": "val_fraction",
    "validationfreq": "eval_every_epochs",
    "validationbatchsize": "eval_batch",
    "jitcompile": "xla",
    "gradientaccumulationsteps": "accumulation",
    "emamomentum": "ema_decay",
    "verbose": "progress=plain",
    # timm
    "b": "per_gpu_batch",
    "opt": "optimizer",
    "sched": "lr_schedule",
    "decayrate": "lr_decay",
    "decayepochs": "lr_steps",
    "decaymilestones": "lr_steps",
    "warmuplr": "warmup_start_lr",
    "smoothing": "label_smoothing",
    "modelemadecay": "ema_decay",
    "modelema": "ema_decay=0.9999",
    "amp": "precision=mixed_float16",
    "ampdtype": "precision",
    "imgsize": "image_size",
    "inputsize": "image_size",
    "croppct": "eval_crop",
    "workers": "data_threads",
    "j": "data_threads",
    "numworkers": "data_threads",
    "gradaccumsteps": "accumulation",
    "output": "run_dir",
    "syncbn": "sync_batch_norm",
    "bnmomentum": "batch_norm_momentum",
    "bneps": "batch_norm_epsilon",
    "loginterval": "log_every_steps",
    "checkpointhist": "keep",
    "torchcompile": "xla",
    "gradcheckpointing": "recompute",
    "logwandb": "tracker=wandb",
    # torchvision
    "datapath": "data_dir",
    "arch": "model",
    "a": "model",
    "wd": "weight_decay",
    "mixupalpha": "mixup",
    "lrscheduler": "lr_schedule",
    "lrwarmupepochs": "warmup_epochs",
    "lrstepsize": "lr_steps",
    "lrgamma": "lr_decay",
    "printfreq": "log_every_steps",
    "outputdir": "run_dir",
    "traincropsize": "image_size",
    "valcropsize": "image_size",
    "usedeterministicalgorithms": "deterministic",
    "autoaugment": "augmentation",
}


def unknown(name: str, value: str, known: Iterable[str]) -> str:
    """Returns one line on a flag that does not exist: ours for another program's, else the nearest of ours.

    Args:
      name: the flag as given, without its dashes.
      value: what was given for it; empty for nothing.
      known: our flags.
    """
    given = f"--{name}" if not value else f"--{name}={value}"
    ours = FOREIGN.get(name.lower().replace("_", "").replace("-", ""))
    if ours is not None:
        flag, equals, _ = ours.partition("=")
        example = ours if equals else f"{flag}={value}" if value else flag
        return f"{given}: this program calls it --{flag}: write --{example}"
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.7)
    hint = f"did you mean {' or '.join(f'--{word}' for word in near)}? " if near else ""
    return f"{given}: no such flag; {hint}--help lists all"
