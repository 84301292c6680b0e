"""Plain arguments for the optimizer and its schedule, from a configuration and the number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_imagenet.numerics import batch_schedule
from hybrid_imagenet.numerics.batch_schedule import BatchSchedule
from hybrid_imagenet.numerics.schedules import peak_rate

if TYPE_CHECKING:
    from hybrid_imagenet.config import Config


def batches(config: Config) -> BatchSchedule:
    """The batch by epoch.

    Raises:
      ValueError: for a --batch_schedule that cannot be read.
    """
    return batch_schedule.parse(
        config.batch_schedule, config.per_gpu_batch, config.accumulation, config.batch_growth, config.epochs
    )


def base_batch(config: Config, workers: int) -> int:
    """Images per update of all workers at the start of the run."""
    return batches(config).at(0).global_batch(workers)


def schedule_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `numerics.schedules.create`.

    For --optimizer=adabound the scheduled rate is Adam's own; that of SGD, to which the bounds close, follows it.
    """
    adabound = config.optimizer == "adabound"
    return {
        "schedule": config.lr_schedule,
        "lr": adam_rate(config, workers) if adabound else config.lr,
        "epochs": float(config.epochs),
        "workers": workers,
        "base_batch": base_batch(config, workers),
        "scaling": "none" if adabound else config.lr_scaling,
        "warmup_epochs": config.warmup_epochs,
        "bounded_warmup": config.optimizer == "hybrid",
        "warmup_start_lr": config.warmup_start_lr,
        "kappa": config.lr_decay,
        "exponent": config.lr_decay_exponent,
        "milestones": config.lr_steps,
        "factor": config.lr_step_factor,
        "power": config.lr_power,
        "final_lr": config.lr_final,
        "momentum": config.momentum,
        "momentum_rule": config.momentum_rule,
        "bound_time": config.bound_time,
        "beta2": config.adabound_beta2,
    }


def adam_rate(config: Config, workers: int) -> float:
    """alpha, the learning rate of Adam inside AdaBound."""
    return config.adabound_lr * (workers if config.adabound_lr_scaling else 1)


def optimizer_arguments(config: Config, workers: int) -> dict[str, Any]:
    """Arguments of `optimizers.create`."""
    peak = peak_rate(config.lr, config.lr_scaling, workers, base_batch(config, workers))
    common: dict[str, Any] = {
        "optimizer": config.optimizer,
        "weight_decay": config.weight_decay,
        "decay_all": config.decay_all,
    }
    sgd = {"learning_rate": peak, "momentum": config.momentum}
    adam = {"beta1": config.adabound_beta1, "beta2": config.adabound_beta2, "eps": config.adabound_eps}
    if config.optimizer == "sgd":
        return common | sgd | {"nesterov": config.nesterov}
    if config.optimizer == "adabound":
        return (
            common
            | adam
            | {
                "learning_rate": adam_rate(config, workers),
                "final_lr": peak,
                "gamma": config.adabound_gamma,
                "amsbound": config.amsbound,
            }
        )
    if config.optimizer == "lars":
        return (
            common
            | sgd
            | {
                "nesterov": config.nesterov,
                "variant": config.lars,
                "eta": config.lars_eta,
                "eps": config.lars_eps,
                "eps_rule": config.lars_eps_rule,
            }
        )
    return (
        common
        | sgd
        | adam
        | {
            "alpha": adam_rate(config, workers),
            "bias_correction": config.bias_correction,
            "handover": config.handover,
            "lars": config.lars,
            "eta": config.lars_eta,
            "lars_eps": config.lars_eps,
            "lars_eps_rule": config.lars_eps_rule,
            "decay_in_warmup": config.decay_in_warmup,
        }
    )
