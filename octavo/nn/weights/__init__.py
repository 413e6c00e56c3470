"""Who owns the FP8 codes of a weight: a WeightSource a linear, which the autograd Functions ask for operands."""
