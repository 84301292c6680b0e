"""Reads the placement of this process in a job: its launcher, host and GPU."""
