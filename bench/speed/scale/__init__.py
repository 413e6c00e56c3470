"""What sharding costs and saves on the GPUs of one host: `torchrun --nproc-per-node 2 -m bench.speed.scale --out DIR`.

Random weights in real shapes, random tokens. Each part first checks that several GPUs compute what one does, then times
its rows one after the other in one process a rank. NCCL on GPUs (set NCCL_NVLS_ENABLE=0 where multicast is to be off);
--toy runs everything at sizes for a CPU, over gloo. `octavo bench scale --gpus N` starts some of it, and of other
programs, for more GPUs (parts.py).
"""
