"""Lists the optimizers by name, in plain values: nothing here needs TensorFlow.

A new optimizer is a class in a module of its own and a line in `OPTIMIZERS`. The arguments of its constructor that have
defaults are its flags: `LARS(eta=...)` is --lars_eta. Those of the common base, and those that begin with the name of
an optimizer, are flags under their own name.
"""

from __future__ import annotations

import dataclasses

BASE = "hybrid_imagenet.optimizers.base:GroupedOptimizer"
NO_FLAGS = frozenset({"learning_rate", "final_lr", "name"})
"""Arguments that are worked out for a run, or that only tests and other programs set."""
_SCHEDULES = "hybrid_imagenet.numerics.schedules"
WARMUP, WARMUP_FROM_ZERO = (
    f"hybrid_imagenet.numerics.decays:{name}" for name in ("gradual_warmup", "warmup_from_zero")
)
MOMENTUM = f"{_SCHEDULES}:momentum_at"
BOUNDS, ADAM, RAMP = (f"{_SCHEDULES}:{name}" for name in ("warmup_bounds", "adam_rate", "lars_share"))


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer.

    Attributes:
      constructor: its class, as module:Class.
      phases: the update rule in each phase of the schedule; with two, the first is a warmup with closing bounds.
      also: functions whose keyword arguments with defaults are options of a run with this optimizer too.
      rate: the flag that is scheduled, and is the constructor's `learning_rate` at its peak.
      averages: whether it has weights of its own to validate (`GroupedOptimizer.evaluated`).
      relative_rate: whether the rate is how far a layer moves in an update, as a part of its norm.
      weight_decay: of a run without --weight_decay; the class itself decays nothing unless told, as Keras's do.
      constants: arguments of the constructor that no paper, recipe or page asks to change: they are no flags.
    """

    constructor: str
    phases: tuple[str, ...]
    also: tuple[str, ...] = (WARMUP, MOMENTUM)
    rate: str = "lr"
    averages: bool = False
    relative_rate: bool = False
    weight_decay: float = 1e-4
    constants: frozenset[str] = frozenset()

    @property
    def bounded_warmup(self) -> bool:
        """Whether a warmup with closing bounds comes first."""
        return len(self.phases) > 1


OPTIMIZERS = {
    "hybrid": Method(
        "hybrid_imagenet.optimizers.hybrid:Hybrid",
        ("AdaBound", "SGD"),
        (BOUNDS, RAMP, MOMENTUM, ADAM),
        constants=frozenset({"adabound_eps"}),
    ),
    "adabound": Method(
        "hybrid_imagenet.optimizers.adabound:AdaBound",
        ("AdaBound",),
        (WARMUP, ADAM),
        rate="adabound_lr",
        constants=frozenset({"eps", "amsbound"}),
    ),
    "sgd": Method("hybrid_imagenet.optimizers.sgd:SGD", ("SGD",)),
    "lars": Method("hybrid_imagenet.optimizers.lars:LARS", ("LARS",)),
    "lamb": Method(
        "hybrid_imagenet.optimizers.lamb:LAMB",
        ("LAMB",),
        (WARMUP_FROM_ZERO,),
        relative_rate=True,
        weight_decay=0.01,
        constants=frozenset({"beta1", "beta2", "eps", "bias_correction"}),
    ),
    "schedule_free": Method(
        "hybrid_imagenet.optimizers.schedule_free:ScheduleFreeSGD",
        ("schedule-free SGD",),
        (WARMUP_FROM_ZERO,),
        averages=True,
        constants=frozenset({"beta"}),
    ),
    "muon": Method(
        "hybrid_imagenet.optimizers.muon:Muon",
        ("Muon",),
        (WARMUP_FROM_ZERO, MOMENTUM),
        weight_decay=0.01,
        constants=frozenset({"nesterov", "steps"}),
    ),
}


def rule(optimizer: str, phase: float) -> str:
    """The name of the update rule that an optimizer follows in a phase, as AdaBound, SGD or LARS."""
    phases = OPTIMIZERS[optimizer].phases
    return phases[-1] if phase else phases[0]


def no_flags(optimizer: str) -> frozenset[str]:
    """The constructor's arguments that are no flags."""
    return NO_FLAGS | OPTIMIZERS[optimizer].constants


def rate_argument(optimizer: str) -> str | None:
    """The constructor's argument that is an option although it is worked out: the rate, where a flag of its own is."""
    return "learning_rate" if OPTIMIZERS[optimizer].rate != "lr" else None


def flag(optimizer: str, argument: str, common: frozenset[str]) -> str:
    """The flag of a constructor's argument; `common` are the arguments of the base."""
    if argument in common or argument.startswith(tuple(f"{name}_" for name in OPTIMIZERS)):
        return argument
    return OPTIMIZERS[optimizer].rate if argument == "learning_rate" else f"{optimizer}_{argument}"
