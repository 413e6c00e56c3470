"""The autograd Functions of octavo's layers, over tensors, a LinearPlan and a WeightSource; none holds a module."""
