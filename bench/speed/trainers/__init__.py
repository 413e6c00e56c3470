"""octavo inside other trainers, against the same trainer in bf16: `python -m bench.speed.trainers --out DIR`.

On one GPU: huggingface (transformers' Trainer) and lora (PEFT). On two, by `torchrun --nproc-per-node 2 -m
bench.speed.trainers`: accelerate (FSDP2, beside one GPU alone), deepspeed (ZeRO-2) and megatron (two tensor-parallel
ranks; set CUDA_DEVICE_MAX_CONNECTIONS=1). Without --only, those that the ranks and the installed packages allow.
Random weights and tokens. The first loss of a variant must be within 1 % of the first variant's. A part's rows join
those that DIR's record has of the same tree and device, so that each part can be a process of its own.
"""
