"""Linears cut among one host's GPUs, beside one GPU: `torchrun --nproc-per-node 2 -m bench.speed.tensor --out DIR`.

Random weights in real shapes, random tokens. Parts: bits; single, mixed, long and large serve; down is one linear,
training a step of layers, refit new weights for a sampler. What a part computes is checked before it is timed; rows
stand beside one GPU alone, which every rank runs for itself, but for large and refit. NCCL on GPUs (set
NCCL_NVLS_ENABLE=0 where multicast is to be off); --toy runs everything at sizes for a CPU, over gloo.
"""
