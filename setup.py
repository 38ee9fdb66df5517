"""Builds the native kernels: one source compiled for each instruction set, in a library that is loaded at run time.

Everything else about the package is in pyproject.toml.
"""

import contextlib
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FLAGS = [
    "-std=c++17",
    "-O2",
    # What the kernels need of -O3, the rest of which takes a fifth of the time. Loops to be unrolled say so.
    "-fvect-cost-model=dynamic",
    "-g0",
    # GCC takes values of intrinsics for uninitialized, in thousands of lines.
    "-w",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
# Of what the library needs, OpenMP is torch's, which is loaded before, and torch needs the C++ runtime itself. Linked
# statically, that would be the builder's, which asks for the builder's C library.
# The timers of pauses.cpp are in librt where the C library is older than 2.34.
LINK_FLAGS = ["-fopenmp", *(["-lrt"] if sys.platform == "linux" else [])]
# Compilers before GCC 12 vectorize nothing by themselves with -O2.
AVX2 = ["-mavx2", "-mfma", "-mprfchw", "-ftree-vectorize"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
# Other machines have nothing but the baseline. On x86 nobody waits for the speed of processors from before AVX2.
INSTRUCTION_SETS = {"baseline": ["-ftree-vectorize"]}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS = {"baseline": ["-O1"], "avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"], "avx512": AVX512}
    INSTRUCTION_SETS["avx512vnni"] = [*AVX512, "-mavx512vnni"]
    # No processor has the one without the other.
    INSTRUCTION_SETS["avx512bf16"] = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
    INSTRUCTION_SETS["amx"] = [*INSTRUCTION_SETS["avx512bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]


class BuildProgress:
    """Says what is compiled and how far it is.

    To the terminal itself if there is one, since pip shows nothing of what a build prints, and else to stderr, which
    pip shows with -v.
    """

    def __init__(self, total: int, terminal: str = "/dev/tty") -> None:
        self.total = total
        self.done = 0
        self.terminal = terminal
        self.began = time.monotonic()

    def __enter__(self) -> "BuildProgress":
        self._stack = contextlib.ExitStack()
        self._out: TextIO = sys.stderr
        if not sys.stderr.isatty():
            with contextlib.suppress(OSError):
                self._out = self._stack.enter_context(open(self.terminal, "w"))
        self._say(f"compiling native kernels, {self.total} files, which takes a minute or so")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        seconds = time.monotonic() - self.began
        self._say(f"native kernels failed: {error}" if error else f"native kernels compiled in {seconds:.0f} s")
        self._stack.close()

    def count(self, name: str) -> None:
        """One more file is compiled."""
        self.done += 1
        self._say(f"compiled {name}, {self.done} of {self.total}, {time.monotonic() - self.began:.0f} s")

    def _say(self, text: str) -> None:
        # A line of its own: pip has left the cursor behind its spinner.
        begin = "\r\n" if self._out is not sys.stderr and not self.done else "\r"
        with contextlib.suppress(OSError):
            print(f"{begin}chairlift: {text}", file=self._out, flush=True)


class BuildKernels(build_ext):
    """Compiles kernels.cpp for each instruction set that the compiler knows, as many at once as there are cores."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link `ext`; a missing compiler raises CompileError, which an optional extension survives."""
        objects: dict[str, list[str]] = {}
        with BuildProgress(len(INSTRUCTION_SETS)) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
            # What takes longest goes first.
            compiling = {pool.submit(self.compile_kernels, isa): isa for isa in reversed(INSTRUCTION_SETS)}
            for task in as_completed(compiling):
                isa = compiling[task]
                try:
                    objects[isa] = task.result()
                except CompileError:
                    if isa == "baseline":
                        pool.shutdown(cancel_futures=True)
                        raise
                    self.warn(f"this compiler cannot build the {isa} kernels; going on without them")
                progress.count(isa)
        defines = [(f"HAVE_{isa.upper()}", "1") for isa in INSTRUCTION_SETS if isa in objects]
        others = self.compile("dispatch.cpp", "dispatch", FLAGS, defines)
        for name in ("pauses", "page_supply", "ggml_blocks"):
            others += self.compile(f"{name}.cpp", name, FLAGS, [])
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        kernels = [each for compiled in objects.values() for each in compiled]
        self.compiler.link_shared_object([*kernels, *others], str(target), extra_postargs=LINK_FLAGS, target_lang="c++")

    def compile_kernels(self, isa: str) -> list[str]:
        """Object files of the kernels for one instruction set."""
        return self.compile("kernels.cpp", isa, [*FLAGS, *INSTRUCTION_SETS[isa]], [("ISA", isa)])

    def compile(self, source: str, folder: str, flags: list[str], macros: list[tuple[str, str]]) -> list[str]:
        """Object files of native/`source`, built in a folder of their own."""
        return self.compiler.compile(
            [f"native/{source}"], str(Path(self.build_temp) / folder), macros, extra_postargs=flags
        )

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without the version of Python, with which it has no tie."""
        return str(Path(*fullname.split("."))) + ".so"


class AnyPythonWheel(bdist_wheel):
    """The wheel fits any Python 3 of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag with only the platform in it."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    headers = [str(path) for path in sorted(Path("native").glob("*.h"))]
    sources = ["kernels", "dispatch", "pauses", "page_supply", "ggml_blocks"]
    setup(
        ext_modules=[
            Extension(
                "chairlift.ops._native", [f"native/{name}.cpp" for name in sources], depends=headers, optional=True
            )
        ],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
    )
