"""Names of models on the Hub: `organization/model`, or `organization/model:file` for one file of it."""

import re
from typing import NamedTuple

_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<file>[A-Za-z0-9][A-Za-z0-9_./-]{{0,255}}\.(?:gguf|onnx)))?")
MAIN = "main"


class HubName(NamedTuple):
    """A model's repository, one `file` of it if that is all that is wanted, and which `revision`: a branch, tag or
    commit."""

    repo: str
    file: str | None = None
    revision: str = MAIN

    def __str__(self) -> str:
        name = self.repo if self.file is None else f"{self.repo}:{self.file}"
        return name if self.revision == MAIN else f"{name} at {self.revision}"


def hub_name(text: str, revision: str | None = None) -> HubName | None:
    """The name that a text is, or None if it can't be one, such as a path with more or fewer parts."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"]:
        return None
    return HubName(found["repo"], found["file"], revision or MAIN)
