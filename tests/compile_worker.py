"""Run outside Triton's interpreter: compiles kernels for GPUs that are not here, with the constants of real launches.

`python -m tests.compile_worker sample|all` runs the selection, AdamW and packed layers on tiny tensors with a launch
function that compiles instead of launching, and prints a line for each kernel: registers, stack (more than zero:
registers were spilled), shuffles, constants.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from secateur.kernels import adamw, decode_triton, launch, scores_triton, select
from secateur.kernels.decode import Form, streams_of
from secateur.kernels.scores_triton import TYPES
from secateur.selection import masks
from secateur.selection.exact import ALONE
from tests import kernel_cases as cases

POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64", torch.bool: "*i1",
}  # fmt: skip
SAMPLE = 90  # the architecture that is always tried
OTHERS = (80,)
CPU = torch.device("cpu")


class Compiler:
    """Stands in for `launch_kernel`."""

    def __init__(self, architectures: tuple[int, ...]) -> None:
        self.architectures, self.done, self.failed = architectures, set(), []  # type: ignore[var-annotated]

    def __call__(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int = 8, *,
        fused: bool = False,
    ) -> None:  # fmt: skip
        names = kernel.arg_names
        types = tuple([self.type_of(value) for value in arguments])
        even = tuple([isinstance(one, torch.Tensor) and one.data_ptr() % 16 == 0 for one in arguments])
        for architecture in self.architectures:
            key = (kernel.__name__, types, even, constants, warps, architecture)
            if key in self.done:
                continue
            values = [TYPES[value] if isinstance(value, torch.dtype) else value for value in constants]
            given = dict(zip(names[len(arguments) :], values, strict=True))
            signature = {**dict(zip(names, types, strict=False)), **dict.fromkeys(given, "constexpr")}
            fixed = {(names.index(name),): value for name, value in given.items()}
            hints = {(place,): [["tt.divisibility", 16]] for place, one in enumerate(even) if one}
            source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
            options = {"num_warps": warps, "enable_fp_fusion": fused}
            try:
                compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            except Exception as error:
                self.failed.append(f"{kernel.__name__} {constants}: {error}")
                raise
            self.done.add(key)
            registers, stack = resources(compiled.asm["cubin"])
            print(kernel.__name__, f"sm_{architecture}", f"warps={warps}", f"registers={registers}", f"stack={stack}",
                  compiled.asm["ptx"].count("shfl.sync"), *constants, flush=True)  # fmt: skip

    @staticmethod
    def type_of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"


def resources(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: more than zero if registers were spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", said)[0]), int(re.findall(r"STACK:(\d+)", said)[0])


def decoding(everything: bool) -> None:
    """Packed layers: every dtype, kind of index and number of inputs."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.int8, torch.float16, torch.float32) if everything else (torch.bfloat16,):
        weight = torch.where(torch.rand(64, 4096) < 0.8, 0.0, 20 * torch.randn(64, 4096)).clamp_(-127, 127).to(dtype)
        scale = torch.ones(64) if dtype == torch.int8 else None
        kept = weight != 0
        inputs = torch.bfloat16 if scale is not None else dtype
        for kind in ("4", "8") if everything else ("4",):
            streams = streams_of(weight[kept], masks.pack(kept), 4096, kinds=(kind,))
            for number in (1, 2, 4) if everything else (1, 4):
                multiply(torch.ones(number, 4096, dtype=inputs), streams.values, streams, scale, streams.form)
                if everything and kind == "4":
                    cells = Form(64, 4096, 2048, 32, 4, cell=4)
                    multiply(torch.ones(number, 4096, dtype=inputs), streams.values, streams, scale, cells)
        offsets = torch.zeros(65, dtype=torch.int64)
        dense = torch.empty(64, 4096, dtype=inputs)
        decode_triton.unpack(weight[kept], masks.pack(kept), offsets, scale, 4096, dense)


def multiply(x: Any, values: Any, streams: Any, scale: Any, form: Form) -> None:
    decode_triton.linear(
        x,
        values,
        streams.indices,
        streams.bases,
        streams.starts,
        streams.shares,
        scale,
        None,
        streams.dtype,
        form.numbers(),
    )


def selecting() -> None:
    """Selections by every built-in score, exact and by histograms, and ranking in tiles."""
    select.SMALL, select.COARSE_SAMPLE, select.GIVEN_TILES = 1 << 10, 1 << 9, 1
    for number, score in enumerate((*cases.FUSED, "bitter5")):
        for alive in (None, "bits", "bool") if score == "variance" else ((None, "bits", "bool")[number % 3],):
            pieces = cases.pieces_for(score, CPU, (5000, 33), alive=alive)
            for packed in (True, False) if score == "variance" else (True,):
                with suppress(Exception):  # nothing is computed, so results make no sense
                    select.prune_groups(launch, [pieces], [2000], ALONE, packed)
                with suppress(Exception):
                    memory = select.MaskMemory([5000, 33], select.BITS if packed else select.BOOL, CPU)
                    chosen = select.Selector(launch, pieces, memory, ALONE)
                    chosen._select_by_histograms(select.requests_for([pieces], [2000], ALONE)[0], 0, 1 << 20)
                with suppress(Exception):
                    select.rank_tiles(launch, pieces[:1], [4], [2], packed)


def stepping() -> None:
    """AdamW with and without masks, and zeroing."""
    for mask in (None, "bits", "bool"):
        for amsgrad, theta, soft in ((False, 0.0, False), (True, 0.5, True)):
            case = {"parameter": torch.bfloat16, "state": torch.bfloat16, "mask": mask, "maximize": False,
                    "unseen": torch.inf, "amsgrad": amsgrad, "theta": theta, "soft": soft}  # fmt: skip
            for dtype in (torch.float32, torch.bfloat16):
                with suppress(AssertionError):
                    cases.check_adamw(adamw, CPU, {**case, "parameter": dtype, "state": dtype})
    with suppress(AssertionError):
        cases.check_zero(adamw, CPU)


def main() -> None:
    warnings.simplefilter("ignore")  # about defaults of later versions of Triton
    everything = sys.argv[1:] == ["all"]
    compiler = Compiler((SAMPLE, *OTHERS) if everything else (SAMPLE,))
    for module in (launch, adamw, decode_triton, scores_triton):
        module.launch_kernel = compiler
    decoding(everything)
    if everything:
        stepping()
        selecting()
    if compiler.failed:
        raise SystemExit("\n".join(compiler.failed))


if __name__ == "__main__":
    main()
