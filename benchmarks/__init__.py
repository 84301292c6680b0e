"""Benchmarks that need a checkout: other implementations beside this package's, and costs of its
parts.
"""
