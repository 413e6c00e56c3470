"""Matrix products, one folder an op: quantized operands, groups of them, high precision, few rows."""
