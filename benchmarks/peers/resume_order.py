"""Finds out which examples a resumed run of PyTorch's trainers sees.

Start it from a checkout: `python benchmarks/peers/resume_order.py`.

Needs an environment with torch, lightning and accelerate; PYTHONPATH names the checkout. Each
trainer makes 4 epochs over 64 examples in batches of 4, once without and once with an interruption.
One line each: whether the resumed run trains the same batches as the undisturbed one, and the
examples of the interrupted epoch trained twice and never.
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

from hybrid_imagenet.order import ExactBatchSampler

COUNT, BATCH, EPOCHS, SEED, WORKERS = 64, 4, 4, 3, 2
STEPS = COUNT // BATCH
STOPS = {"at the end of an epoch": 2 * STEPS, "inside an epoch": 24}
Batches = list[list[int]]


class _Noting(lightning.LightningModule):
    """A model that notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.notes: Batches = []

    def training_step(self, batch: Any, index: int) -> Any:
        """Notes the batch."""
        self.notes.append(batch.tolist())
        return (self.weight * 0).sum()

    def configure_optimizers(self) -> Any:
        """Any optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


def with_lightning(
    stop: int | None, resume: bool, folder: str, *, loader: Callable[..., Any]
) -> Batches:
    """One run by `Trainer.fit`, with the sampler that it uses on several ranks."""
    sampler = DistributedSampler(range(COUNT), num_replicas=1, rank=0, seed=SEED)
    whole = stop is None or stop % STEPS == 0
    epochs, steps = (EPOCHS if stop is None else stop // STEPS, -1) if whole else (-1, stop)
    save = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=None if whole else 1
    )
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "devices": 1,
    }
    trainer = lightning.Trainer(
        max_epochs=epochs,
        max_steps=steps,
        accelerator="cpu",
        callbacks=[save],
        use_distributed_sampler=False,
        **options,
    )
    model = _Noting()
    data = loader(list(range(COUNT)), batch_size=BATCH, sampler=sampler, num_workers=WORKERS)
    trainer.fit(model, data, ckpt_path=f"{folder}/last.ckpt" if resume else None)
    return model.notes


def with_accelerate(
    stop: int | None, resume: bool, folder: str, *, seedable: bool, set_epoch: bool = False
) -> Batches:
    """Runs the loop of accelerate's own example.

    It uses `save_state`, `load_state` and `skip_first_batches`.
    """
    accelerate.utils.set_seed(SEED)
    settings = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    data = DataLoader(list(range(COUNT)), batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    _, data = accelerator.prepare(torch.nn.Linear(1, 1), data)
    notes: Batches = []
    steps, epoch, skipped = pathlib.Path(folder) / "steps", 0, 0
    if resume:
        accelerator.load_state(folder)
        epoch, skipped = divmod(int(steps.read_text()), STEPS)
    for number in range(epoch, EPOCHS):
        if set_epoch:
            data.set_epoch(number)
        rest = (
            accelerator.skip_first_batches(data, skipped) if skipped and number == epoch else data
        )
        for batch in rest:
            notes.append(batch.tolist())
            if len(notes) == stop:
                accelerator.save_state(folder)
                steps.write_text(str(stop))
                return notes
    return notes


def with_ours(stop: int | None, resume: bool, folder: str) -> Batches:
    """One run of a plain loop over a `DataLoader` with this package's sampler."""
    sampler = ExactBatchSampler(COUNT, BATCH, seed=SEED)
    if resume:
        sampler.load_state_dict(torch.load(f"{folder}/order"))
    data = DataLoader(list(range(COUNT)), batch_sampler=sampler, num_workers=WORKERS)
    notes: Batches = []
    for batch in itertools.chain.from_iterable(data for _ in range(sampler.epoch, EPOCHS)):
        notes.append(batch.tolist())
        sampler.advance()
        if len(notes) == stop:
            torch.save(sampler.state_dict(), f"{folder}/order")
            break
    return notes


def judge(run: Callable[..., Batches], stop: int) -> str:
    """Describes how often a run that was stopped after `stop` batches used each example."""
    whole = run(None, False, tempfile.mkdtemp())
    folder = tempfile.mkdtemp()
    before = run(stop, False, folder)
    after = run(None, True, folder)
    start = stop // STEPS * STEPS
    epoch = collections.Counter(itertools.chain(*before[start:], *after[: STEPS - (stop - start)]))
    same = "as undisturbed" if before + after == whole else "OTHER BATCHES"
    again = ", epoch 0 again" if stop == start and after[:STEPS] == whole[:STEPS] else ""
    twice = sum(times > 1 for times in epoch.values())
    return (
        f"{same}{again}; of the epoch's {COUNT} examples {twice} twice, {COUNT - len(epoch)} never"
    )


def main() -> None:
    """Prints a line for each trainer and interruption."""
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    runs: dict[str, Any] = {
        f"Lightning {lightning.__version__}": functools.partial(with_lightning, loader=DataLoader),
        "  with StatefulDataLoader": functools.partial(with_lightning, loader=stateful),
        f"accelerate {accelerate.__version__}": functools.partial(with_accelerate, seedable=False),
        "  with use_seedable_sampler": functools.partial(with_accelerate, seedable=True),
        "  and set_epoch in each epoch": functools.partial(
            with_accelerate, seedable=True, set_epoch=True
        ),
        "ours": with_ours,
    }
    for name, run in runs.items():
        for when, stop in STOPS.items():
            print(f"{name}, {when}: {judge(run, stop)}", flush=True)


if __name__ == "__main__":
    main()
