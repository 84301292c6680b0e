"""A search for the learning rate and the warmup on a short budget, which H leaves to future work."""
