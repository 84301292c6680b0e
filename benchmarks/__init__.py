"""The benchmarks of `python -m benchmarks`: comparisons with others, and parts of the program."""
