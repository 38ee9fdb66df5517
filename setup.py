"""Builds the native kernels: one source compiled for each instruction set, in a library that is loaded at run time.

Everything else about the package is in pyproject.toml.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]
AVX2 = ["-mavx2", "-mfma", "-mprfchw"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": AVX2, "avx512": AVX512}
    INSTRUCTION_SETS["avx512vnni"] = [*AVX512, "-mavx512vnni"]
    # No processor has the one without the other.
    INSTRUCTION_SETS["avx512bf16"] = [*AVX512, "-mavx512bf16", "-mavx512vnni"]


class BuildKernels(build_ext):
    """Compiles kernels.cpp for each instruction set that the compiler knows."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link `ext`; a missing compiler raises CompileError, which an optional extension survives."""
        objects, defines = [], []
        for isa, flags in INSTRUCTION_SETS.items():
            try:
                objects += self.compile("kernels.cpp", isa, [*FLAGS, *flags], [("ISA", isa)])
            except CompileError:
                if isa == "baseline":
                    raise
                self.warn(f"this compiler cannot build the {isa} kernels; going on without them")
            else:
                defines.append((f"HAVE_{isa.upper()}", "1"))
        objects += self.compile("dispatch.cpp", "dispatch", FLAGS, defines)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-fopenmp"], target_lang="c++")

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


headers = [str(path) for path in sorted(Path("native").glob("*.h"))]
setup(
    ext_modules=[
        Extension(
            "chairlift.ops._native", ["native/kernels.cpp", "native/dispatch.cpp"], depends=headers, optional=True
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
