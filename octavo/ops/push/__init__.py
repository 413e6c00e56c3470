"""Large messages among the GPUs of one host: a kernel writes a matrix into the other ranks' memory, where it belongs.

The ranks wait for each other before and after it; distributed.pushes owns the memory and does so.
"""
