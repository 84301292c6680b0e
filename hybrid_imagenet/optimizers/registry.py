"""Lists the optimizers by name, and declares their options; nothing here needs TensorFlow.

A new optimizer is a class in its own module and a line in `OPTIMIZERS` here. If it has options that
no other has, they are the fields of a frozen dataclass. These are also the arguments of the class,
and fields that are declared by `option` are flags too. Help, checks and the configuration of a run
are made from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.options import Option, ValueType, option, options_of
from hybrid_imagenet.schedules import relative_step
from hybrid_imagenet.schedules.training_schedule import (
    AdamScaling,
    BoundedWarmup,
    LinearWarmup,
    MomentumRule,
    Rule,
    WarmupFromZero,
)

PROGRAM_TRUST_COEFFICIENT = 0.001
"""Default of the flag --lars_eta. The classes have none: `fit` derives theirs from the batch."""
HANDOVERS = ("continuous", "reset", "rescale")
VARIANTS = ("you", "larc", "none")
EPS_RULES = ("add", "floor")
_EPS = "Small number that keeps the denominator of the trust ratio above 0."
_EPS_RULE = (
    "How --lars_eps acts on the denominator of the trust ratio. add: it is added (MLPerf). floor:"
    " it replaces smaller denominators (Mikami et al.)."
)
_VARIANT = (
    "Learning rate of each layer. you: the learning rate times the trust ratio (You et al.). larc:"
    " the same, but at most the learning rate (LARC). none: the learning rate itself."
)


def _momentum(default: float, text: str) -> Any:
    return option(default, text, minimum=0, maximum=0.9999)


def _weight_decay(text: str, default: float = 0.0) -> Any:
    return option(default, text, minimum=0, basic=True)


def _decoupled_decay() -> Any:
    return option(
        False,
        "Subtract weight_decay * learning rate / its peak times the weights before each update,"
        " instead of adding decay to the gradient (Loshchilov and Hutter). --weight_decay is then"
        " the value for 256 images, and follows the batch.",
    )


def _nesterov(flag: str) -> Any:
    return option(False, "Use Nesterov's momentum, as MLPerf's reference writes it.", flag=flag)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every optimizer.

    Attributes:
      learning_rate: The value before a schedule sets another one. In the program it is computed
        from the flag `OptimizerSpec.rate`.
      weight_decay: Coefficient of coupled L2 decay.
      decay_all: Decay biases and normalization parameters too.
      global_clipnorm: Largest norm of the gradient of all weights together, as in Keras; None for
        no clipping.
      name: Name of the optimizer; by default that of its class.
    """

    learning_rate: float = 0.1
    _: dataclasses.KW_ONLY
    weight_decay: float = _weight_decay(
        "Weight decay as L2 regularization: this times the weights is added to the gradient."
    )
    decay_all: bool = option(
        False, "Decay biases and normalization parameters too (Jia et al. do not)."
    )
    global_clipnorm: float | None = option(
        None,
        "Clip gradients: if the norm of the gradient of all weights together, averaged over ranks,"
        " is above this, scale the gradient down to it (default: no clipping).",
        above=0,
        flag="clip_norm",
    )
    name: str = ""

    @property
    def layer_variant(self) -> str:
        """How the learning rate of each layer is scaled, one of `VARIANTS`."""
        return "none"

    @property
    def decay_is_decoupled(self) -> bool:
        """Whether a step subtracts decay from the weights (--decoupled_decay)."""
        # Some optimizers do not have this option.
        return bool(getattr(self, "decoupled_decay", False))

    def gradient_factor(self, momentum: Any) -> Any:
        """Returns the factor of the gradient in the velocity, see `relative_step`.

        Args:
          momentum: A number, or a tensor of float32 inside a step.
        """
        return relative_step.gradient_factor(None, momentum)


@dataclasses.dataclass(frozen=True)
class MomentumOptions(Options):
    """Options of an optimizer with momentum."""

    momentum: float = _momentum(0.9, "Momentum of SGD (Goyal et al.).")


@dataclasses.dataclass(frozen=True)
class SgdOptions(MomentumOptions):
    """Options of `sgd`."""

    _: dataclasses.KW_ONLY
    nesterov: bool = _nesterov("sgd_nesterov")
    decoupled_decay: bool = _decoupled_decay()


@dataclasses.dataclass(frozen=True)
class LarsOptions(MomentumOptions):
    """Options of `lars`.

    Attributes:
      trust_coefficient: Coefficient eta. By default `fit` sets it from the global batch and the
        peak learning rate, see `optimizers.layer_scaled`.
    """

    learning_rate: float = 1.0
    momentum: float = _momentum(0.9, "Momentum of LARS.")
    _: dataclasses.KW_ONLY
    trust_coefficient: float | None = option(
        None,
        "Trust coefficient (Mikami et al. state 0.01, LARC 0.02).",
        minimum=0,
        flag="lars_eta",
    )
    eps: float = option(0.0, _EPS, minimum=0, flag="lars_eps")
    eps_rule: str = option("add", _EPS_RULE, choices=EPS_RULES, flag="lars_eps_rule")
    variant: str = option("you", _VARIANT, choices=VARIANTS, flag="lars_variant")
    nesterov: bool = _nesterov("lars_nesterov")
    decoupled_decay: bool = _decoupled_decay()

    @property
    def layer_variant(self) -> str:
        return self.variant


@dataclasses.dataclass(frozen=True)
class HybridOptions(MomentumOptions):
    """Options of `hybrid`; those of AdaBound and LARS are prefixed with their names.

    Attributes:
      adabound_beta1: Decay of AdaBound's first moment.
      adabound_beta2: Decay of AdaBound's second moment.
      adabound_eps: Added to sqrt(v).
      trust_coefficient: Coefficient eta of LARS. By default `fit` sets it from the global batch and
        the learning rate after the warmup, see `optimizers.layer_scaled`.
    """

    momentum: float = _momentum(
        0.9,
        "Momentum of SGD with LARS, after the AdaBound warmup (Goyal et al.). The formulas of Lu et"
        " al. show none, which is 0.",
    )
    _: dataclasses.KW_ONLY
    adabound_lr: float = option(1e-3, "Learning rate alpha of Adam inside AdaBound.", minimum=0)
    adabound_beta1: float = 0.9
    adabound_beta2: float = 0.999
    adabound_eps: float = 1e-8
    bias_correction: bool = option(
        True, "Correct Adam's step for bias (Lu et al. print none).", flag="hybrid_bias_correction"
    )
    handover: str = option(
        "continuous",
        "How the velocity of SGD begins after the AdaBound warmup: continuous goes on averaging as"
        " AdaBound did, so the size of the update does not jump; reset begins at 0; rescale begins"
        " as if SGD with momentum had run before.",
        choices=HANDOVERS,
        flag="hybrid_handover",
    )
    trust_coefficient: float | None = option(
        None,
        "Trust coefficient, which Lu et al. do not print (default: derived from the batch, see"
        " docs/methods.md).",
        minimum=0,
        flag="lars_eta",
    )
    lars_eps: float = option(0.0, _EPS, minimum=0)
    lars_eps_rule: str = option("add", _EPS_RULE, choices=EPS_RULES)
    lars_variant: str = option("you", _VARIANT, choices=VARIANTS)
    decay_in_warmup: bool = option(
        False,
        "Decay the weights in the AdaBound warmup too (Lu et al. decay them in SGD only).",
        flag="hybrid_decay_in_warmup",
    )
    decoupled_decay: bool = _decoupled_decay()

    @property
    def layer_variant(self) -> str:
        return self.lars_variant

    def gradient_factor(self, momentum: Any) -> Any:
        return relative_step.gradient_factor(self.handover, momentum)


@dataclasses.dataclass(frozen=True)
class AdaBoundOptions(Options):
    """Options of `adabound`.

    Attributes:
      final_lr: The rate of SGD, at which the bounds close.
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      eps: Added to sqrt(v).
    """

    learning_rate: float = option(
        1e-3, "Learning rate alpha of Adam inside AdaBound.", above=0, flag="adabound_lr"
    )
    _: dataclasses.KW_ONLY
    final_lr: float = 0.1
    gamma: float = option(
        1e-3, "How fast the bounds close, per step.", above=0, flag="adabound_gamma"
    )
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True)
class AdamWOptions(Options):
    """Options of `adamw`, with the defaults of `keras.optimizers.AdamW`.

    Attributes:
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      eps: Added to sqrt(v).
    """

    learning_rate: float = 1e-3
    _: dataclasses.KW_ONLY
    weight_decay: float = _weight_decay(
        "Weight decay, decoupled: each update subtracts the learning rate times this part of the"
        " weights.",
        default=0.004,
    )
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-7


@dataclasses.dataclass(frozen=True)
class LambOptions(Options):
    """Options of `lamb`.

    Attributes:
      learning_rate: The relative step of each layer; of biases and normalization, the rate of Adam.
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      eps: Added to sqrt(v).
    """

    learning_rate: float = 0.01
    _: dataclasses.KW_ONLY
    weight_decay: float = _weight_decay(
        "Weight decay: this times the weights is added to Adam's step, before a layer's step is"
        " scaled."
    )
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class MuonOptions(MomentumOptions):
    """Options of `muon`.

    Attributes:
      nesterov: Nesterov's momentum.
      steps: Steps of Newton and Schulz in each update.
    """

    learning_rate: float = 0.02
    momentum: float = _momentum(
        0.95, "Momentum of Muon: Nesterov's, whose direction is then made orthogonal for kernels."
    )
    _: dataclasses.KW_ONLY
    weight_decay: float = _weight_decay(
        "Weight decay, decoupled: each update subtracts the learning rate times this part of the"
        " weights."
    )
    nesterov: bool = True
    steps: int = 5


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer.

    Attributes:
      constructor: Its class, as module:Class.
      options: The dataclass of its options.
      phases: The name of the update rule in each phase of the schedule, as reports show it; with
        two phases, the first is a warmup with closing bounds.
      rules: Dataclasses of the options of the schedule that a run with this optimizer has too.
      rate: Name of the flag from which the peak learning rate is computed.
      relative_rate: Whether the rate is how far a layer moves in an update, as a part of its norm.
      weight_decay: Weight decay of a run without --weight_decay. The classes have Keras's defaults:
        they decay nothing unless told, but for AdamW.
      example_rate: The learning rate that an error suggests to a run without --lr, whose default
        belongs to SGD; None if the optimizer can train with that default.
    """

    constructor: str
    options: type[Options]
    phases: tuple[str, ...]
    rules: tuple[type[Rule], ...] = (LinearWarmup, MomentumRule)
    rate: str = "lr"
    relative_rate: bool = False
    weight_decay: float = 1e-4
    example_rate: float | None = None

    @property
    def bounded_warmup(self) -> bool:
        """Whether a warmup with closing bounds comes first."""
        return len(self.phases) > 1

    @property
    def flags(self) -> Mapping[str, Option]:
        """Options by flag: those of this optimizer, and of its warmup and momentum rules."""
        options: dict[str, Option] = {}
        for option_class in (self.options, *self.rules):
            options |= options_of(option_class)
        options["weight_decay"] = dataclasses.replace(
            options["weight_decay"], default=self.weight_decay
        )
        if "lars_eta" in options:
            # A run always has a number: its recipe, its batch, or this default sets it.
            options["lars_eta"] = dataclasses.replace(
                options["lars_eta"], default=PROGRAM_TRUST_COEFFICIENT, kind=ValueType(float)
            )
        return options


OPTIMIZERS = {
    "hybrid": OptimizerSpec(
        "hybrid_imagenet.optimizers.hybrid:Hybrid",
        HybridOptions,
        ("AdaBound", "SGD"),
        (BoundedWarmup, MomentumRule, AdamScaling),
    ),
    "adabound": OptimizerSpec(
        "hybrid_imagenet.optimizers.adabound:AdaBound",
        AdaBoundOptions,
        ("AdaBound",),
        (LinearWarmup, AdamScaling),
        rate="adabound_lr",
    ),
    "adamw": OptimizerSpec(
        "hybrid_imagenet.optimizers.adamw:AdamW",
        AdamWOptions,
        ("AdamW",),
        (WarmupFromZero,),
        weight_decay=0.05,
        example_rate=0.001,
    ),
    "sgd": OptimizerSpec("hybrid_imagenet.optimizers.sgd:SGD", SgdOptions, ("SGD",)),
    "lars": OptimizerSpec("hybrid_imagenet.optimizers.lars:LARS", LarsOptions, ("LARS",)),
    "lamb": OptimizerSpec(
        "hybrid_imagenet.optimizers.lamb:LAMB",
        LambOptions,
        ("LAMB",),
        (WarmupFromZero,),
        relative_rate=True,
        weight_decay=0.01,
    ),
    "muon": OptimizerSpec(
        "hybrid_imagenet.optimizers.muon:Muon",
        MuonOptions,
        ("Muon",),
        (WarmupFromZero, MomentumRule),
        weight_decay=0.01,
    ),
}


def rule(optimizer: str, phase: float) -> str:
    """Returns the name of an optimizer's update rule in a phase, such as AdaBound or SGD."""
    phases = OPTIMIZERS[optimizer].phases
    return phases[-1] if phase else phases[0]
