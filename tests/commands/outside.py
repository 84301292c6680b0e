"""Starts a module in a Python that has no packages: `outside.py ROOT MODULE ARGUMENT...`."""

import runpy
import sys

sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
