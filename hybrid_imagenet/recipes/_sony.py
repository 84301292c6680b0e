"""Settings that all recipes of Mikami et al. share: LARS, augmentation, 2D torus, and the schedules
of §3.2.

They state a LARS coefficient of 0.01 and call it the default, which in their library is 0.001: the
base's 0.001 stands.

Their formula for the momentum of configuration B has lost its operators. Read with 32 * 1024 and B
below the learning rate, it keeps the noise scale, m = 1 - 0.1 * 32768 / B: .95 at 64K. That is
`noise_scale`, taken here, since tuned LARS has its momentum rise with the batch as well (MLPerf's
table: .952 at 64K). Read as printed, with both beside the rate above the line, it is
`--momentum_rule=noise_scale_inverse`, m = 1 - 0.1 B / 32768: .8 at 64K.

An epoch on their clusters lasts 1.4 to 2.5 s, so validations and checkpoints are four epochs apart.

Weight decay is the default, 1e-4: they print none.
"""

_COMMON = {
    "optimizer": "lars",
    "lars_eps": 1e-06,
    "lars_eps_rule": "floor",
    "augmentation": "sony",
    "allreduce": "torus",
    "eval_every_epochs": 4,
    "checkpoint_every_epochs": 4,
}
CONFIGURATION_A = {**_COMMON, "lr_schedule": "sony_a", "warmup_epochs": 34.0}
CONFIGURATION_B = {
    **_COMMON,
    "lr_schedule": "sony_b",
    "warmup_epochs": 5.0,
    "momentum_rule": "noise_scale",
}
