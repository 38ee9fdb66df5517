"""Builds the native kernels: one source compiled for each instruction set, in a library that is loaded at run time.

Everything else about the package is in pyproject.toml.
"""

import contextlib
import os
import platform
import runpy
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TextIO

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

# Not imported: the package needs what is only there once this is built.
usable_cpus = runpy.run_path(str(Path(__file__).parent / "chairlift" / "runners" / "host_cpus.py"))["usable_cpus"]

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
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mprfchw", "-ftree-vectorize"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
# Other machines have nothing but the baseline. On x86 nobody waits for the speed of processors from before AVX2.
INSTRUCTION_SETS = {"baseline": ["-ftree-vectorize"]}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS = {"baseline": ["-O1"], "avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"], "avx512": AVX512}
    INSTRUCTION_SETS["avx512vnni"] = [*AVX512, "-mavx512vnni"]
    # No processor has the one without the other.
    INSTRUCTION_SETS["avx512bf16"] = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
    INSTRUCTION_SETS["amx"] = [*INSTRUCTION_SETS["avx512bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
# The last thing that an assembler learnt of each: it may be older than the compiler.
PROBES = {
    "avx2": "vpermq $0, %ymm0, %ymm0",
    "avxvnni": "{vex} vpdpbusd %ymm0, %ymm0, %ymm0",
    "avx512": "vpermw %zmm0, %zmm0, %zmm0",
    "avx512vnni": "vpdpbusd %zmm0, %zmm0, %zmm0",
    "avx512bf16": "vdpbf16ps %zmm0, %zmm0, %zmm0",
    "amx": "tdpbusd %tmm0, %tmm1, %tmm2",
}
# What Linux says of a processor that has each.
CPU_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avxvnni": {"avx_vnni"},
    "avx512": {"avx512bw", "avx512dq", "avx512vl"},
    "avx512vnni": {"avx512_vnni"},
    "avx512bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
}
# Beside the kernels, and for any processor.
OTHERS = ("dispatch", "pauses", "page_supply", "ggml_blocks")
_AFTER_ALL = (
    "the compiler itself works, so see above what it says: where it was killed there is too little memory "
    "(before the command, `taskset -c 0` compiles one file at a time). CC=false CXX=false installs without kernels"
)


def runs_here(isa: str, told: str = "/proc/cpuinfo") -> bool:
    """Whether this processor has an instruction set; true where the system does not say what it has."""
    try:
        lines = Path(told).read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    return flags is None or CPU_FLAGS.get(isa, set()) <= {*flags}


def optimizes_here_only() -> bool:
    """Whether kernels that this processor can't run are compiled the fast way, which makes slow ones: for tests."""
    wanted = os.environ.get("CHAIRLIFT_OPTIMIZE", "all")
    if wanted not in ("all", "here"):
        raise SystemExit(f"CHAIRLIFT_OPTIMIZE={wanted!r} is neither 'all' nor 'here'")
    return wanted == "here"


class BuildProgress:
    """Says what is compiled and how far it is.

    To the terminal itself if there is one, since pip shows nothing of what a build prints, and else to stderr, which
    pip shows with -v.
    """

    def __init__(self, terminal: str = "/dev/tty") -> None:
        self.total = 0
        self.done = 0
        self.terminal = terminal
        self.began = time.monotonic()

    def __enter__(self) -> "BuildProgress":
        self._stack = contextlib.ExitStack()
        self._out: TextIO = sys.stderr
        if not sys.stderr.isatty():
            with contextlib.suppress(OSError):
                self._out = self._stack.enter_context(open(self.terminal, "w"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        seconds = time.monotonic() - self.began
        self._say(f"native kernels failed: {error}" if error else f"native kernels compiled in {seconds:.0f} s")
        self._stack.close()

    def begin(self, total: int) -> None:
        """So many files are going to be compiled."""
        self.total = total
        self._say(f"compiling native kernels, {total} files, which takes a minute or two")

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
        """Compile and link `ext`; a missing compiler raises CompileError, which an optional extension survives.

        What fails after the compiler was tried is a failure of this very build, for want of memory or space: nobody
        shall get a package without kernels by that.
        """
        with BuildProgress() as progress:
            known = [isa for isa in INSTRUCTION_SETS if self.is_known(isa)]
            defines = [(f"HAVE_{isa.upper()}", "1") for isa in known]
            compiled = {
                name: partial(self.compile, f"{name}.cpp", name, FLAGS, defines if name == "dispatch" else [])
                for name in OTHERS
            } | {isa: partial(self.compile_kernels, isa) for isa in known}
            progress.begin(len(compiled))
            try:
                self.link(ext, self.compile_all(compiled, progress))
            except (CompileError, LinkError) as error:
                raise SystemExit(f"{error}; {_AFTER_ALL}") from error

    def is_known(self, isa: str) -> bool:
        """Whether compiler and assembler have an instruction set. Raises CompileError if they don't compile at all."""
        probe = Path(self.build_temp) / "probe" / f"{isa}.cpp"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text(f'void probe() {{ __asm__("{PROBES.get(isa, "")}"); }}\n')
        try:
            self.compiler.compile([str(probe)], str(probe.parent), extra_postargs=[*FLAGS, *INSTRUCTION_SETS[isa]])
        except CompileError:
            if isa == "baseline":
                raise
            self.warn(f"this compiler cannot build the {isa} kernels; going on without them")
            return False
        return True

    def compile_all(self, compiled: dict[str, Callable[[], list[str]]], progress: BuildProgress) -> list[str]:
        """Object files of what these calls compile, in their order, whichever is done first."""
        jobs = usable_cpus() if self.parallel is None or self.parallel is True else int(self.parallel)
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            # What takes longest goes first.
            tasks = {name: pool.submit(compiled[name]) for name in reversed(compiled)}
            names = {task: name for name, task in tasks.items()}
            try:
                for task in as_completed(names):
                    task.result()
                    progress.count(names[task])
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [made for name in compiled for made in tasks[name].result()]

    def link(self, ext: Extension, objects: list[str]) -> None:
        """Make the library. Of what several objects have, templates of the C++ library, it keeps the first one's.

        So those come first that run anywhere, and a set before all that need more of the processor.
        """
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=LINK_FLAGS, target_lang="c++")

    def compile_kernels(self, isa: str) -> list[str]:
        """Object files of the kernels for one instruction set."""
        flags = [*FLAGS, *INSTRUCTION_SETS[isa]]
        if optimizes_here_only() and not runs_here(isa):
            # Without weak symbols no other set gets a template of this one, which nothing is inlined in.
            flags += ["-O0", "-fno-weak"]
        return self.compile("kernels.cpp", isa, flags, [("ISA", isa)])

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
    sources = ["kernels", *OTHERS]
    setup(
        ext_modules=[
            Extension(
                "chairlift.ops._native", [f"native/{name}.cpp" for name in sources], depends=headers, optional=True
            )
        ],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
    )
