"""Small messages among the GPUs of one host in one kernel: each rank writes into every other one's memory, and waits.

reference.py says what comes out; distributed.one_shot owns the memory and asks for the kernels.
"""
