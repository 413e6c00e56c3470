"""What octavo's tests and benchmarks share, shipped so that yours can too: inputs, assertions, tolerances.

interpreter.py and compile.py run and compile Triton kernels on a machine without a GPU; import them by name.
"""

from octavo.testing.assertions import assert_bitwise, assert_sqnr
from octavo.testing.generators import GENERATORS, generate

__all__ = ["GENERATORS", "assert_bitwise", "assert_sqnr", "generate"]
