"""docs/compat.md says of other servers' scenarios what the tests here show, no more and no less."""

import ast
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "compat.md"


def covered() -> dict[str, list[str]]:
    """The scenarios that tests go through, by suite."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        names = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "covers":
                suite, *scenarios = (names[each.id] if isinstance(each, ast.Name) else each.value for each in node.args)
                found[suite] += scenarios
    return found


def tables() -> list[list[list[str]]]:
    """The cells of the page's tables, without their heads."""
    blocks = PAGE.read_text().split("\n\n")
    rows = [
        [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]
        for block in blocks
        if "|---" in block
    ]
    assert len(rows) == 3
    return rows


def test_the_page_counts_what_is_tested() -> None:
    counts, failed, inapplicable = tables()
    tested, others = covered(), {"failed": failed, "not applicable": inapplicable}
    told = {suite: list(map(int, numbers)) for suite, *numbers in counts}
    assert set(told) == set(tested) | {row[0] for rows in others.values() for row in rows}
    for suite, (scenarios, passed, *rest) in told.items():
        names = tested.get(suite, [])
        assert passed == len(names) == len(set(names)), suite
        listed = {kind: [row[1].strip("`") for row in rows if row[0] == suite] for kind, rows in others.items()}
        assert rest == [len(each) for each in listed.values()], suite
        everything = [*names, *listed["failed"], *listed["not applicable"]]
        assert scenarios == len(everything) == len(set(everything)), suite
        assert all(reason for rows in others.values() for *_, reason in rows)
