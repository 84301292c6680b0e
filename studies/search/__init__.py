"""Searches for the learning rate and the warmup on a short budget, which Lu et al. leave to future work."""
