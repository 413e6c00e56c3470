"""Hugging Face checkpoints on the disk: safetensors, tensor names, dialects, and what octavo adds beside them."""
