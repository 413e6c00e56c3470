"""Per-tensor scales of an FP8 KV cache: how they are made, handed over with the weights, and held to them."""
