"""Linears cut among one host's GPUs, beside one GPU: `torchrun --nproc-per-node 2 -m bench.speed.tensor --out DIR`.

Random weights in real shapes, random tokens. Bits are compared first; each row is timed beside one GPU alone, which
every rank runs for itself. NCCL on GPUs (set NCCL_NVLS_ENABLE=0 where multicast is to be off); --toy runs everything at
sizes for a CPU, over gloo.
"""
