"""core/ decides, and nothing else: no clock, no threads, no chance, no input or output."""

import ast
import sys
from pathlib import Path

import pytest

import chairlift.core

CORE = Path(chairlift.core.__file__).parent
FORBIDDEN = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uuid",
}
FORBIDDEN_CALLS = {"__import__", "eval", "exec", "input", "open", "print"}


def problems(source: str) -> list[str]:
    """Name whatever this source imports or calls that core must not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if node.level == 0 else ["." * node.level]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            found.append(f"{node.func.id}()")
        for module in modules:
            top = module.split(".")[0]
            own = module == "chairlift.core" or module.startswith("chairlift.core.")
            allowed = own or top == "msgspec" or (top in sys.stdlib_module_names and top not in FORBIDDEN)
            if not allowed:
                found.append(module)
    return found


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.name)
def test_core_imports_only_the_standard_library_msgspec_and_itself(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "import asyncio as a",
        "import torch",
        "from random import choice",
        "from chairlift.errors import ChairliftError",
        "from chairlift.core2 import x",
        "from . import x",
        "def f(): import os",
        "open('x')",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert problems(source)
