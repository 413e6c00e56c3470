"""Up to how many tokens skinny_mm's kernels run."""

# Measured on an H200: our kernels are quicker than the library up to the first at all weights, to the second at some.
FEW_TOKENS, MAX_TOKENS = 32, 256
