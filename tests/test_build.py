"""Building: what it says meanwhile, and what the library needs of the machine that it runs on."""

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chairlift.ops.native import LIBRARY

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_progress_goes_to_the_terminal_as_pip_hides_the_rest(
    build: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = tmp_path / "tty"
    terminal.touch()
    with build["BuildProgress"](2, str(terminal)) as progress:
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
    with pytest.raises(RuntimeError), build["BuildProgress"](1, str(tmp_path / "none" / "tty")):
        raise RuntimeError("no compiler")
    said = capsys.readouterr().err
    assert "compiling native kernels" in said
    assert "native kernels failed: no compiler" in said


def test_every_instruction_set_has_its_kernels(build: dict[str, Any]) -> None:
    declared = re.findall(r"^namespace (\w+) \{ extern const Kernels", (ROOT / "native/kernels.h").read_text(), re.M)
    assert set(build["INSTRUCTION_SETS"]) <= set(declared)


@pytest.mark.skipif(not LIBRARY.exists(), reason="the native library is not built")
def test_the_library_needs_nothing_that_torch_does_not_need() -> None:
    try:
        said = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("there is no readelf")
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", said))
    assert needed <= {"libgomp", "libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64", "libpthread"}
