"""Building: what it says meanwhile, and what the library needs of the machine that it runs on."""

import ctypes
import re
import runpy
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.native_isa import ISAS, needs_native, runs_here

from chairlift.ops.native import LIBRARY

pytest.importorskip("setuptools")
from setuptools import Distribution, Extension
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_progress_goes_to_the_terminal_as_pip_hides_the_rest(
    build: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = tmp_path / "tty"
    terminal.touch()
    with build["BuildProgress"](str(terminal)) as progress:
        progress.begin(2)
        progress.count("avx2")
        assert "compiled avx2, 1 of 2" in terminal.read_text()
        progress.count("baseline")
    said = [line for line in terminal.read_text().splitlines() if line]
    assert "compiling native kernels, 2 files" in said[0]
    assert "compiled baseline, 2 of 2" in said[2]
    assert "native kernels compiled in" in said[3]
    assert capsys.readouterr().err == ""


def test_progress_goes_to_stderr_where_there_is_no_terminal(
    build: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = build["BuildProgress"](str(tmp_path / "none" / "tty"))
    with pytest.raises(RuntimeError), progress:
        raise RuntimeError("no compiler")
    said = capsys.readouterr().err
    assert "native kernels failed: no compiler" in said


class FakeCompiler:
    """Makes an object of everything, but raises for those whose names, or flags, are among what it can't do."""

    def __init__(self, *cannot: str) -> None:
        self.cannot = cannot
        self.linked: list[str] = []

    def compile(
        self, sources: list[str], folder: str, macros: object = None, extra_postargs: Sequence[str] = ()
    ) -> list[str]:
        name = Path(folder).name if Path(folder).name != "probe" else f"probe of {Path(sources[0]).stem}"
        if {name, *extra_postargs} & set(self.cannot):
            raise CompileError(f"command 'g++' failed at {name}")
        return [name]

    def link_shared_object(self, objects: list[str], target: str, **settings: object) -> None:
        if "link" in self.cannot:
            raise LinkError("command 'g++' failed at the link")
        self.linked = objects


Builds = Callable[..., tuple[Any, FakeCompiler]]


@pytest.fixture
def builder(build: dict[str, Any], tmp_path: Path) -> Builds:
    def make(*cannot: str) -> tuple[Any, FakeCompiler]:
        command = build["BuildKernels"](Distribution())
        command.build_temp, command.build_lib, command.parallel = str(tmp_path / "temp"), str(tmp_path / "lib"), 3
        command.compiler = FakeCompiler(*cannot)
        return command, command.compiler

    return make


EXTENSION = Extension("chairlift.ops._native", ["native/kernels.cpp"], optional=True)


def test_what_several_objects_have_is_taken_from_one_that_runs_anywhere(
    build: dict[str, Any], builder: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    command, compiler = builder()
    command.build_extension(EXTENSION)
    assert compiler.linked == [*build["OTHERS"], *build["INSTRUCTION_SETS"]], "the least that a processor needs first"
    assert f"{len(compiler.linked)} of {len(compiler.linked)}" in capsys.readouterr().err


def test_instruction_sets_that_the_compiler_does_not_know_are_left_out(
    build: dict[str, Any], builder: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(build["INSTRUCTION_SETS"], "future", ["-mfuture"])
    command, compiler = builder("-mfuture")
    command.build_extension(EXTENSION)
    assert "baseline" in compiler.linked
    assert "future" not in compiler.linked
    assert "compiled future" not in capsys.readouterr().err


@pytest.mark.parametrize(("wanted", "unoptimized"), [("here", {"avx512", "avx512vnni", "amx"}), ("all", set())])
def test_kernels_that_do_not_run_here_can_be_compiled_sooner(
    wanted: str,
    unoptimized: set[str],
    build: dict[str, Any],
    builder: Builds,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor : 0\nflags : fpu fma f16c avx2 avx_vnni\n")
    runs_here = build["runs_here"]
    monkeypatch.setitem(runs_here.__globals__, "runs_here", lambda isa: runs_here(isa, str(told)))
    sets = {isa: [f"-m{isa}"] for isa in ("baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "amx")}
    monkeypatch.setitem(runs_here.__globals__, "INSTRUCTION_SETS", sets)
    monkeypatch.setenv("CHAIRLIFT_OPTIMIZE", wanted)
    command, compiler = builder()
    flags: dict[str, Sequence[str]] = {}
    compile_one = compiler.compile

    def compile_and_note(*args: Any, extra_postargs: Sequence[str] = ()) -> list[str]:
        (made,) = compile_one(*args, extra_postargs=extra_postargs)
        flags[made] = extra_postargs
        return [made]

    monkeypatch.setattr(compiler, "compile", compile_and_note)
    command.build_extension(EXTENSION)
    assert {isa for isa in sets if "-O0" in flags[isa]} == unoptimized
    assert runs_here("amx", str(tmp_path / "none")), "where the system does not say, it may run"


def test_another_choice_of_what_is_optimized_is_refused(builder: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_OPTIMIZE", "native")
    command, _ = builder()
    with pytest.raises(SystemExit, match="CHAIRLIFT_OPTIMIZE='native' is neither 'all' nor 'here'"):
        command.build_extension(EXTENSION)


@pytest.mark.parametrize("fails", ["baseline", "dispatch", "link"])
def test_a_compiler_that_works_and_then_fails_leaves_no_package_without_kernels(
    fails: str, builder: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed for want of memory, say; an optional extension would survive what setuptools raises itself."""
    command, _ = builder(fails)
    with pytest.raises(SystemExit, match=f"failed at (the )?{fails}; the compiler itself works"):
        command.build_extension(EXTENSION)
    said = capsys.readouterr().err
    assert "native kernels failed: command 'g++' failed" in said
    assert "native kernels compiled in" not in said


def test_without_a_compiler_the_package_does_without_kernels(
    builder: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _ = builder("-std=c++17")
    with pytest.raises(CompileError):
        command.build_extension(EXTENSION)
    assert "native kernels failed" in capsys.readouterr().err


def test_every_instruction_set_has_its_kernels(build: dict[str, Any]) -> None:
    declared = re.findall(r"^namespace (\w+) \{ extern const Kernels", (ROOT / "native/kernels.h").read_text(), re.M)
    assert set(build["INSTRUCTION_SETS"]) <= set(declared)


AVX512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
# What a processor must have for them, as /proc/cpuinfo names it.
NEEDED = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512": AVX512,
    "avx512vnni": AVX512 | {"avx512_vnni"},
    "avx512bf16": AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx": AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}


def may_use_tiles() -> bool:
    """Whether the system gives a process the registers of AMX, as native/dispatch.cpp asks it."""
    number, request, tile_data = map(ctypes.c_long, (158, 0x1023, 18))
    return ctypes.CDLL(None).syscall(number, request, tile_data) == 0


@needs_native
def test_every_instruction_set_of_this_processor_was_built(build: dict[str, Any]) -> None:
    """Or all its tests would be skipped, as where the processor does not have it."""
    assert set(build["INSTRUCTION_SETS"]) <= set(NEEDED) == set(ISAS)
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("there is no /proc/cpuinfo")
    # Other machines than x86 name nothing there, and have the baseline alone.
    flags = set(" ".join(re.findall(r"^flags\s*:(.*)$", about, re.M)[:1]).split())
    missing = [isa for isa, needed in NEEDED.items() if needed <= flags and not runs_here(isa)]
    if "amx" in missing and not may_use_tiles():
        missing.remove("amx")
    assert not missing, "this compiler does not know them, or their flags in setup.py are wrong"


def test_every_file_of_the_package_is_packed() -> None:
    """An installed package has what is written in Python, and what package-data names."""
    try:
        listed = subprocess.run(["git", "ls-files", "chairlift"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["chairlift"]
    packed = {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "chairlift").glob(pattern)}
    assert {name for name in listed.stdout.splitlines() if not name.endswith(".py")} <= packed


@pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")
def test_the_library_needs_nothing_that_torch_does_not_need() -> None:
    try:
        said = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no readelf")
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", said))
    assert needed <= {"libgomp", "libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64", "libpthread"}


@pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")
def test_what_instruction_sets_share_runs_on_every_processor() -> None:
    """Weak symbols: of templates of the C++ library one object's copy serves all, the baseline's kernels too."""
    try:
        named = subprocess.run(["nm", "-S", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True)
        disassembled = [
            subprocess.run(
                ["objdump", "-d", f"--start-address={start}", f"--stop-address={start + size}", str(LIBRARY)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for start, size in (
                (int(begin, 16), int(length, 16))
                for begin, length in re.findall(r"^(\w+) (\w+) [Ww] ", named.stdout, re.M)
            )
        ]
    except FileNotFoundError:
        pytest.skip("there is no binutils")
    assert disassembled
    # Of x86 those with a name in v are VEX and EVEX, and only they have these registers.
    assert not re.findall(r"\tv\w+ .*|%[yz]mm.*", "".join(disassembled))
