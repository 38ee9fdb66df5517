"""How the product hangs together: which package may import which, and that every name is there once."""

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import chairlift

ROOT = Path(chairlift.__file__).parent

# What each package imports: only from those above it in this table. `chairlift` is chairlift/__init__.py.
ARROWS = {
    "errors": "",
    "logs": "errors",
    "core": "",
    "folders": "errors",
    "gguf": "errors folders",
    "hub": "errors folders gguf",
    "config": "core errors folders gguf hub",
    "bodies": "errors",
    "ops": "errors",
    "runners": "config core errors folders gguf ops",
    "text": "bodies core errors folders runners",
    "engine": "config core errors logs runners",
    "jobs": "bodies config errors",
    "library": "config core engine errors folders hub runners text",
    "chairlift": "core errors library",
    "demo": "",
    "plan": "config core errors",
    "own_server": "errors",
    "bench": "config core demo engine errors folders hub library plan runners text",
    "planning": "bench config core demo errors own_server plan runners",
    "server": "bodies chairlift config core engine errors folders jobs logs plan runners text",
    "run": "bodies config demo engine errors jobs runners server",
    "commands": "config core errors folders gguf hub own_server runners",
    "cli": "bench chairlift commands config demo errors hub planning run server",
}

# The same for the rooms within a package. `.` is what lies in no room: in a server, what puts its rooms together.
ROOMS = {
    "core": {".": "", "sequences": ".", "items": "."},
    "runners": {"grammars": "", "decoder": "grammars", "encoder": "decoder"},
    "engine": {".": "", "sequences": ".", "items": "."},
    "server": {
        "http": "",
        "metrics": "",
        "models": "http metrics",
        "conversations": "http models",
        "requests": "metrics models",
        "twin": "http metrics models requests",
        "openai": "http models conversations",
        "anthropic": "http models conversations openai",
        "responses": "http models conversations openai",
        "items": "http models openai",
        "oip": "http items models",
        "batches": "http models oip",
        "live": "batches http metrics models requests",
        ".": "anthropic batches http items live models oip openai requests responses twin",
    },
}

# Sequences and items have a file of the same name where they have the same part; so have decoders and encoders.
TWINS = ({"sequences", "items"}, {"decoder", "encoder"})
# The same two words as files: what these packages have for each.
TWIN_FILES = {"sequences.py", "items.py"}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50


@cache
def sources() -> dict[str, ast.Module]:
    """Every module's tree by its dotted name below `chairlift`; that of chairlift/__init__.py is "chairlift"."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "chairlift"] = ast.parse(path.read_text())
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of the product that a module names, wherever it does: in functions and for type checkers too."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would be overlooked here"
            # `from chairlift.core import cost` names a module, `from chairlift.core.cost import CostModel` does not.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "chairlift":
                yield rest if rest in sources() else rest.rpartition(".")[0] or "chairlift"


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {name: set(imported(tree)) - {name} for name, tree in sources().items()}


def package_of(module: str) -> str:
    return module.split(".")[0]


def room_of(module: str, rooms: Iterable[str]) -> str:
    """The room of its package that a module lies in, "." for none."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in rooms else "."


def unlike(table: dict[str, str], real: dict[str, set[str]]) -> list[str]:
    """What a table and reality do not have in common."""
    allowed = {name: set(targets.split()) for name, targets in table.items()}
    found = [f"{name}: not in the table, or not there" for name in allowed.keys() ^ real.keys()]
    for name in sorted(allowed.keys() & real.keys()):
        found += [f"{name} -> {target} is not allowed" for target in sorted(real[name] - allowed[name])]
        found += [f"{name} -> {target} is allowed, and nobody uses it" for target in sorted(allowed[name] - real[name])]
    return found


def upward(table: dict[str, str]) -> list[str]:
    """The arrows of a table to a row that comes no earlier."""
    order = list(table)
    return [f"{n} -> {t}" for n in order for t in table[n].split() if order.index(t) >= order.index(n)]


def test_packages_import_what_the_table_says() -> None:
    real: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph().items():
        real[package_of(module)] |= {package_of(target) for target in targets} - {package_of(module)}
    assert not (found := unlike(ARROWS, real)), "\n".join(found)


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_what_the_table_says(package: str) -> None:
    rooms = ROOMS[package]
    real: dict[str, set[str]] = {room: set() for room in rooms}
    for module, targets in graph().items():
        room = room_of(module, rooms)
        if package_of(module) == package and room in rooms:
            inside = (room_of(target, rooms) for target in targets if package_of(target) == package)
            real[room] |= {target for target in inside if target in rooms} - {room}
    assert not (found := unlike(rooms, real)), "\n".join(found)


def test_every_room_is_in_the_table() -> None:
    folders = {path.parent.relative_to(ROOT).parts for path in ROOT.glob("*/*/*.py")}
    assert folders == {(package, room) for package, rooms in ROOMS.items() for room in rooms if room != "."}


@pytest.mark.parametrize("table", [ARROWS, *ROOMS.values()], ids=["chairlift", *ROOMS])
def test_no_arrow_of_a_table_runs_up(table: dict[str, str]) -> None:
    assert upward(table) == []


def test_sequences_and_items_know_nothing_of_each_other() -> None:
    """Token by token and in one call: two products on one foundation, in every package."""
    crossing = [
        f"{module} -> {target}"
        for module, targets in graph().items()
        for target in targets
        if half_of(module) and half_of(target) and half_of(module) != half_of(target)
    ]
    assert crossing == []


def half_of(module: str) -> set[str]:
    return {"sequences", "items"}.intersection(module.split("."))


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def type_names(tree: ast.Module) -> Iterator[str]:
    """The types that a module defines: classes wherever they are, and aliases. Type variables stand for others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        made = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(made, ast.Name) and made.id in ("TypeVar", "ParamSpec", "TypeVarTuple"):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and re.fullmatch(r"_*[A-Z]\w*[a-z]\w*|[A-Z]", target.id):
                yield target.id


def twice(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """What has several homes: name and homes, for pairs of them."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, home in names:
        homes[name].append(home)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_no_type_is_defined_twice() -> None:
    found = twice((name, module) for module, tree in sources().items() for name in type_names(tree))
    assert not found, "\n".join(f"{name}: {', '.join(homes)}" for name, homes in found.items())


def test_no_file_name_is_there_twice() -> None:
    paths = [path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.name not in {"__init__.py", *TWIN_FILES}]
    found = twice((path.name, path.parent.as_posix()) for path in paths)
    assert {name: homes for name, homes in found.items() if not are_twins(homes)} == {}


def are_twins(homes: list[str]) -> bool:
    """Whether these folders are two halves of one package; what both are like may lie in the package itself."""
    halves = [home for home in homes if home.rpartition("/")[2] in set().union(*TWINS)]
    above = {half.rpartition("/")[0] for half in halves}
    return len(above) == 1 and {half.rpartition("/")[2] for half in halves} in TWINS and {*homes} <= {*halves, *above}


def test_files_and_functions_are_short() -> None:
    long = []
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(ROOT).as_posix()
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{name}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_what_would_be_found() -> None:
    """The checks themselves see what they are for."""
    source = """
if TYPE_CHECKING:
    from chairlift.core.cost import CostModel
def f():
    import chairlift.errors
    from chairlift import cli
    from chairlift import batched
    from starlette import requests
Alias = dict[str, int]
_Private: object = int
LIMIT = 3
T = TypeVar("T")
class Outer:
    class Inner: ...
"""
    tree = ast.parse(source)
    assert sorted(imported(tree)) == ["chairlift", "cli", "core.cost", "errors"]
    assert sorted(type_names(tree)) == ["Alias", "Inner", "Outer", "_Private"]
    assert unlike({"a": "b", "b": ""}, {"a": set(), "b": {"a"}}) == [
        "a -> b is allowed, and nobody uses it",
        "b -> a is not allowed",
    ]
    assert upward({"a": "b", "b": "a"}) == ["a -> b"]
    assert twice([("X", "a"), ("Y", "a"), ("X", "b")]) == {"X": ["a", "b"]}
    assert are_twins(["core/items", "core/sequences"])
    assert are_twins(["core", "core/items", "core/sequences"])
    assert not are_twins(["core", "core/items"])
    assert not are_twins(["core/items", "engine/sequences"])
    assert not are_twins(["core/items", "core/sequences", "engine/items"])
