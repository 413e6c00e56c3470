"""Models trained in FP8 beside bf16: loss, perplexity and accuracy, with the pages that show them."""
