"""Oracle for the gradient noise scale: a population of per-example gradients whose mean and covariance are known."""

import itertools

import numpy as np


def expected_squares(population, batch):
    """E |mean of `batch` independent draws|^2, over all equally likely draws."""
    squares = [np.sum(np.mean(draw, axis=0) ** 2) for draw in itertools.product(population, repeat=batch)]
    return float(np.mean(squares))


def simple_noise_scale(population):
    """McCandlish et al., equation 2.9: |G|^2, tr(Sigma)."""
    population = np.asarray(population, np.float64)
    mean = population.mean(axis=0)
    covariance = (population - mean).T @ (population - mean) / len(population)
    return float(mean @ mean), float(np.trace(covariance))
