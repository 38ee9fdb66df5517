"""What the documents say of the tree is true: each file that they name is there."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "native").glob("*.md")])
# Where a path in a document may start.
STARTS = (ROOT, ROOT / "chairlift", ROOT / "tests", ROOT / "docs")
_PATH = re.compile(r"(?<![\w/.:<-])((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cpp|md|png|toml)|(?:[\w-]+/)+(?=`))")
_FOREIGN = re.compile(r"https?://\S+")
_ANCHOR = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_are_there(document: Path) -> None:
    text = _FOREIGN.sub("", document.read_text())
    inline = " ".join(re.findall(r"`[^`\n]+`|\]\([^)\s]+\)", text))
    named = {found for found in _PATH.findall(inline) if not found.startswith(("path/", "venv/"))}
    missing = {name for name in named if not any((start / name).exists() for start in (*STARTS, document.parent))}
    assert not missing


def slug(heading: str) -> str:
    """What GitHub calls a heading in an address."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    """The places in a document that an address may name."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", document.read_text()), re.MULTILINE)
    return {slug(heading) for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_places_that_a_document_names_are_there(document: Path) -> None:
    for name, anchor in _ANCHOR.findall(document.read_text()):
        target = document.parent / name if name else document
        assert target.suffix != ".md" or anchor in anchors(target), f"{name}#{anchor}"


def test_the_page_of_models_is_what_the_families_say() -> None:
    sys.path.append(str(ROOT / "scripts"))
    import models_doc

    assert models_doc.PATH.read_text() == models_doc.text(), "run scripts/models_doc.py"


def test_the_check_sees_a_missing_file() -> None:
    assert _PATH.findall("see `core/no_such_file.py` and [x](../core/other.md)") == [
        "core/no_such_file.py",
        "../core/other.md",
    ]
    assert _ANCHOR.findall("[a](b.md#c) [d](#e) [f](https://g/h#i)") == [("b.md", "c"), ("", "e")]
    assert slug("`a`, [b](c) & d_e!") == "a-b--d_e"
