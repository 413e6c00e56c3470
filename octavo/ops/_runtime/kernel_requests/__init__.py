"""Kernels that steps ask for, named in place of being compiled."""
