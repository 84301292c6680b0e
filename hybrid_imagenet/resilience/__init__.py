"""Detects ranks that hang, are stopped or are lost, and ends or restarts the job."""
