"""Compiling Triton kernels for a GPU that is not there: registers, spills, shared memory and PTX, for tests and CI.

`record_launches` catches what a launcher would run, so that exactly the shipped configurations are compiled.
"""

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from octavo.errors import BackendError
from octavo.testing.interpreter import is_interpreting


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What ptxas and Triton say of one compiled kernel.

    Attributes:
        registers: a thread.
        spill_bytes: stores and loads of spilled registers together; 0 where none.
        stack_bytes: local memory a thread.
        shared_bytes: shared memory a block.
        ptx: the PTX text, to look for an instruction such as "wgmma" or "cvt.rn.satfinite.e4m3x2".
        notes: ptxas's warnings, one a line (C7515 among them is a serialised wgmma).
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    ptx: str
    notes: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch as Triton specializes it: what `compile_for` needs."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def compile(self, arch: int = 90) -> CompileReport:
        """Compile this launch for `arch`."""
        return compile_for(
            self.kernel, self.signature, self.constants, arch, attributes=self.attributes, options=self.options
        )

    def __str__(self) -> str:
        constants = {self.kernel.arg_names[k[0]]: v for k, v in self.constants.items()}
        return f"{self.kernel.__name__}({self.signature}, {constants}, {self.options})"


def compile_for(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[Any, Any],
    arch: int = 90,
    *,
    attributes: dict[Any, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> CompileReport:
    """Compile a kernel for an NVIDIA GPU without one.

    Args:
        kernel: a triton.jit function.
        signature: Triton's type of each parameter by name: "*bf16", "*fp8e4nv", "fp32", "i32", "constexpr".
        constants: value of each constexpr parameter, by name or by (index,).
        arch: 90 (sm_90a), 100 (sm_100a) and the like.
        attributes: Triton's hints by (index,), such as {(0,): [["tt.divisibility", 16]]}.
        options: num_warps, num_stages and the like.
    Returns:
        CompileReport.
    Raises:
        BackendError: inside the interpreter, or where the assembler refuses the code or the architecture.
    """
    if is_interpreting():
        raise BackendError("nothing compiles under TRITON_INTERPRET=1; compile in a process without it")
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language import target_info

    source, target = ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", arch, 32)
    source.hash()  # kept by triton, which cannot read the source of what stands in for current_target
    with (
        mock.patch.object(target_info, "current_target", return_value=target),  # what kernels ask for their GPU
        mock.patch.object(knobs.runtime, "add_stages_inspection_hook", _assemble_once),
    ):
        compiled = triton.compile(source, target=target, options=options or {})
    ptx, text = compiled.asm["ptx"], compiled.metadata.ptxas_log
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    assert spills and registers, f"ptxas said nothing that is understood here: {text}"
    return CompileReport(
        registers=int(registers[1]),
        spill_bytes=int(spills[2]) + int(spills[3]),
        stack_bytes=int(spills[1]),
        shared_bytes=compiled.metadata.shared,
        ptx=ptx,
        notes="\n".join(line for line in text.splitlines() if "warning" in line.lower() or "C75" in line),
    )


@contextlib.contextmanager
def record_launches(arch: int = 90) -> Iterator[list[Launch]]:
    """Catch kernel launches instead of running them; works on CPU tensors, whose outputs stay unwritten.

    Yields:
        The list that fills with one Launch for each distinct specialization.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    backend = make_backend(GPUTarget("cuda", arch, 32))
    launches: dict[str, Launch] = {}
    found: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        _, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
        launch = Launch(kernel, signature, constants, attributes, options)
        if launches.setdefault(f"{launch} {attributes}", launch) is launch:
            found.append(launch)

    original = jit.JITFunction.run
    jit.JITFunction.run = record
    try:
        yield found
    finally:
        jit.JITFunction.run = original


def _assemble_once(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
    """A hook of triton's: the last stage keeps what ptxas says in place of the code, under a cache key of its own."""
    if stages is None:
        return "octavo.testing.compile", "1"

    def keep_log(ptx: str, metadata: dict[str, Any]) -> bytes:
        metadata["ptxas_log"] = _run_ptxas(ptx, backend.target.arch)
        return b""

    stages["cubin"] = keep_log
    return None


def _run_ptxas(ptx: str, arch: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}a", str(path), "-o", str(Path(folder, "cubin"))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise BackendError(f"ptxas refused the kernel for sm_{arch}a: {done.stdout.strip()}")
    return done.stdout
