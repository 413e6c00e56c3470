"""Kernels, linears, layers and training steps beside their peers: time, memory and energy."""
