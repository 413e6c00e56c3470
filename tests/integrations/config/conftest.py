"""Megatron's flags are tried on the training loop's small runs."""

from tests.train.conftest import corpus, make_config  # noqa: F401
