"""What octavo's tests and benchmarks share, shipped so that yours can too: inputs, assertions, tolerances, timing.

interpreter.py and compile.py run and compile Triton kernels on a machine without a GPU; import them by name.
"""

from octavo.testing.assertions import assert_bitwise, assert_sqnr
from octavo.testing.bench import Record, Timing, time_calls
from octavo.testing.generators import GENERATORS, generate

__all__ = ["GENERATORS", "Record", "Timing", "assert_bitwise", "assert_sqnr", "generate", "time_calls"]
