"""What the recipes of Mikami et al. (S) share: LARS, their augmentation, the 2D torus, and the schedules of 3.2.

S states a LARS coefficient of 0.01 and calls it the default, which in its library is 0.001: the base's 0.001 stands.
"""

_COMMON = {
    "optimizer": "lars",
    "lars_eps": 1e-06,
    "lars_eps_rule": "floor",
    "augmentation": "sony",
    "allreduce": "torus",
}
CONFIGURATION_A = {**_COMMON, "lr_schedule": "sony_a", "warmup_epochs": 34.0}
CONFIGURATION_B = {**_COMMON, "lr_schedule": "sony_b", "warmup_epochs": 5.0, "momentum_rule": "noise_scale"}
