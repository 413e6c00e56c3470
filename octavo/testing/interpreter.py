"""The corrected Triton interpreter: runs our kernels on a CPU with a GPU's casts, in a process of its own.

The stock one is silently wrong for FP8 casts (lost mantissa carry, ties rounded up, no saturation), for bf16 in
arithmetic and in `tl.dot` (bits taken as integers) and rounds bf16 towards zero. This replaces those parts, on
private names, so the triton versions are pinned. It tests our kernels, not the GPU: the same tests run on one too.
"""

import functools
import os
import subprocess
import sys
from typing import Any

from octavo.errors import BackendError

VERIFIED_TRITON = ("3.6.0", "3.7.1", "3.8.0")


def is_interpreting() -> bool:
    """Whether this process runs Triton kernels in the interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on `arguments` in a new process under the interpreter, which cannot be switched on later.

    Returns:
        The finished process with its combined output as text in stdout.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@functools.cache
def correct_interpreter() -> None:
    """Replace the interpreter's float conversion, dot and fma by correct ones, for the rest of the process.

    Raises:
        BackendError: outside TRITON_INTERPRET=1, or for a triton release that this was never checked against.
    """
    if not is_interpreting():
        raise BackendError(
            "the corrected interpreter needs TRITON_INTERPRET=1 before the first kernel is defined, and it is not set; "
            "use octavo.testing.interpreter.run_pytest, which starts such a process"
        )
    import triton

    if triton.__version__ not in VERIFIED_TRITON:
        raise BackendError(
            f"the corrected interpreter patches private names of triton {', '.join(VERIFIED_TRITON)}, "
            f"got {triton.__version__}; install one of these, or check the new one and add it to VERIFIED_TRITON"
        )
    _patch()


def _patch() -> None:
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    _remember_types(interpreter, tl)
    stored = interpreter._get_np_dtype
    fp8 = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}
    packed = {tl.bfloat16: ml_dtypes.bfloat16, **fp8}  # kept as unsigned integers by the interpreter
    stock = {name: getattr(builder, name) for name in ("binary_op", "unary_op", "create_clampf")}

    def is_packed(handle: Any) -> bool:
        return handle.data.dtype in (np.uint8, np.uint16) and handle.dtype.scalar in packed

    def decode(handle: Any) -> Any:
        """A handle's numbers; bf16 and FP8 become fp32."""
        return handle.data.view(packed[handle.dtype.scalar]).astype(np.float32) if is_packed(handle) else handle.data

    def encode(numbers: Any, dtype: Any) -> Any:
        """A handle of `dtype`, rounded to nearest even; FP8 saturates, with every NaN as 0x7F, as in a GPU's cvt."""
        scalar = dtype.scalar
        if scalar in fp8:
            largest = float(ml_dtypes.finfo(fp8[scalar]).max)
            codes = np.clip(numbers, -largest, largest).astype(fp8[scalar]).view(np.uint8)
            return interpreter.TensorHandle(np.where(np.isnan(numbers), np.uint8(0x7F), codes), scalar)
        data = numbers.astype(packed.get(scalar, stored(dtype))).view(stored(dtype))
        return interpreter.TensorHandle(data, scalar)

    def cast(self: Any, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
        if rounding_mode not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise BackendError("the corrected interpreter only rounds to nearest even; drop fp_downcast_rounding")
        with np.errstate(all="ignore"):
            return encode(decode(src), dst_type)

    def elementwise(name: str) -> Any:
        def run(self: Any, *arguments: Any) -> Any:
            handles = [a for a in arguments if isinstance(a, interpreter.TensorHandle)]
            with np.errstate(all="ignore"):
                if not any(map(is_packed, handles)):
                    return stock[name](self, *arguments)
                rest = arguments[len(handles) :]
                numbers = [interpreter.TensorHandle(decode(h), tl.float32) for h in handles]
                result = stock[name](self, *numbers, *rest)
                return result if result.data.dtype == bool else encode(result.data, handles[0].dtype)

        return run

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        # fp64 holds the sums of 8- and 16-bit products whatever their order.
        product = np.matmul(decode(a).astype(np.float64), decode(b).astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            return encode(decode(x).astype(np.float64) * decode(y) + decode(z), z.dtype)

    prepared: set[Any] = set()

    def call_nested(self: Any, *arguments: Any, **keywords: Any) -> Any:
        # The stock one prepares the whole language again at every call of a device function: half of all time.
        if self.fn not in prepared:
            prepared.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **keywords)

    stock_tensor_patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        stock_tensor_patch(tensor, scope)
        # 3.6 makes an int of an array, which numpy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpretedFunction.__call__ = call_nested
    builder.cast_impl = cast
    builder.create_fp_to_fp = cast
    builder.create_dot = dot
    builder.create_fma = fma
    # These two drop NaN (the stock ones return it, as the propagating create_minimumf and create_maximumf do).
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    for name in stock:
        setattr(builder, name, elementwise(name))


def _remember_types(interpreter: Any, tl: Any) -> None:
    """Let types of numpy and of blocks, and shapes, be worked out once and not at every operation: a third of all time.

    Pointers are left out: two of one name may differ.
    """
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    stock, make_block, make_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    stored = functools.cache(stock)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return stock(scalar) if isinstance(scalar, tl.pointer_type) else stored(scalar)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:
            make_block(self, element_ty, shape)
            return
        sizes = tuple(getattr(size, "value", size) for size in getattr(shape, "value", shape))
        if (key := (element_ty.name, sizes)) in blocks:
            vars(self).update(blocks[key])
        else:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()

    def init_tensor(self: Any, handle: Any, type: Any) -> None:  # triton's names
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes in shapes:
            vars(self).update(shapes[sizes], handle=handle, type=type, dtype=type.scalar)
        else:
            make_tensor(self, handle, type)
            shapes[sizes] = {name: vars(self)[name] for name in ("shape", "numel")}

    interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__ = np_dtype, init_block, init_tensor
