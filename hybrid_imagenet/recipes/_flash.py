"""Settings that all recipes of Mikami et al. share.

They are LARS, the augmentation, the 2D torus, and the schedules of section 3.2.

The paper states a LARS coefficient of 0.01 and calls it the default. In the library of the authors
the default is 0.001, so the recipes keep the 0.001 of this program.

The formula for the momentum of configuration B is printed without its operators. The recipes read
it as m = 1 - 0.1 * 32768 / B (`noise_scale`), which keeps the noise scale constant and gives 0.95
at 64K images. This agrees with tuned LARS, whose momentum grows with the batch too: MLPerf's table
has 0.952 at 64K. Read as printed, with 32768 and B above the line, the formula is
m = 1 - 0.1 * B / 32768 (`--momentum_rule=noise_scale_inverse`), which gives 0.8 at 64K.

The epochs at which the batches of experiments 1 to 3 change are readings: the columns of Table 3
span several ranges of epochs, and the spans are lost in the text of the paper that we have.

An epoch on the authors' clusters takes 1.4 to 2.5 s, so validations and checkpoints are four epochs
apart.

Weight decay is the default of 1e-4, because the paper prints none.
"""

COMMON = {
    "optimizer": "lars",
    "lars_eps": 1e-06,
    "lars_eps_rule": "floor",
    "augmentation": "flash",
    "allreduce": "torus",
    "eval_every_epochs": 4,
    "checkpoint_every_epochs": 4,
}
CONFIGURATION_A = {**COMMON, "lr_schedule": "flash_a", "warmup_epochs": 34.0}
CONFIGURATION_B = {
    **COMMON,
    "lr_schedule": "flash_b",
    "warmup_epochs": 5.0,
    "momentum_rule": "noise_scale",
}
