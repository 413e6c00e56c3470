"""Launching Triton kernels in little CPU time: see triton.py."""
