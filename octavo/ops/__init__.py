"""One folder an op: the public function in __init__.py, its ground truth in reference.py, its kernel in triton.py."""
