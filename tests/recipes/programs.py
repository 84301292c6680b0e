"""A program that the tests of recipes run on each rank."""

import pathlib

from hybrid_imagenet import comm, config, train

WARMUPS = ("hybrid", "hybrid_p40", "lu_as_printed")  # one epoch of AdaBound, one of SGD


def train_recipe(name: str, folder: str) -> list:
    """Trains two epochs of a recipe; returns why it ended, and the algorithms of its sums."""
    model = (
        ["--image_size=63"]
        if name == "four_minutes_alexnet"
        else ["--model=resnet8", "--image_size=16"]
    )
    model += (
        [] if name.startswith("four_minutes") else ["--model_width=4"]
    )  # which needs large buckets for the ring
    resolved = config.resolve(
        [
            f"--recipe={name}",
            "--dataset=digits",
            f"--data_dir={folder}",
            f"--run_dir={pathlib.Path(folder) / name}",
            "--epochs=2",
            f"--per_gpu_batch={27 if name == 'flash_exp3' else 8}",
            "--precision=float32",
            "--progress=none",
            "--checkpoint_every_epochs=2",
            "--log_every_steps=3",
            *model,
            *(["--warmup_epochs=1"] if name in WARMUPS else []),
            *(
                ["--image_size_schedule=0:12,1:16", "--eval_image_size=24", "--ema_every=2"]
                if name == "short"
                else []
            ),
            *(["--batch_schedule=0:*1,1:*2.5"] if name == "flash_exp4" else []),
        ],
        comm.placement().size,
    )
    c = comm.start(
        comm.CommunicationSettings(allreduce=resolved.allreduce, compression=resolved.compression)
    )
    outcome = train.run(resolved, c)
    return [outcome, sorted({b["algorithm"] for b in c.statistics()["buckets"]})]
