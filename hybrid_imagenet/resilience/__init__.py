"""Notices ranks that hang, diverge, are stopped or are lost, and lets the run end or continue."""
