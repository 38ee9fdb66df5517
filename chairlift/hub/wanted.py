"""Which files of a repository a model needs: weights once and as safetensors, tokenizer, templates, settings."""

import re
from collections.abc import Collection, Iterable
from typing import Annotated, NamedTuple

from msgspec import Meta

from chairlift.errors import UnsupportedModel
from chairlift.folders.tensor_files import WEIGHTS, WEIGHTS_INDEX, conversion
from chairlift.gguf.part_names import GGUF_PART, part_name
from chairlift.hub.name import HubName

# More than these are no model's, and would only take time and disk.
MAX_FILES = 2_000
_SHARD = re.compile(r"model(\.safetensors)?-\d{1,6}-of-\d{1,6}\.safetensors")
_SETTINGS = re.compile(
    r"[\w.-]+\.(json|jinja)|vocab\.txt|merges\.txt|tokenizer\.model|additional_chat_templates/[\w-]+\.jinja"
)
# The modules of sentence-transformers: 1_Pooling/config.json, 2_Dense/model.safetensors.
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
_PLAIN = re.compile(r"[\w][\w. +-]*(/[\w][\w. +-]*)*")
# Bytes of a name, which file systems take no more of.
_LONGEST = 255


class HubFile(NamedTuple):
    """A file of a repository: bytes, and what it must be by SHA-256, or by git's SHA-1 where that is all there is.

    What the Hub does not say is None. Hashes become names of files.
    """

    name: str
    size: Annotated[int, Meta(ge=0)] | None
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")] | None = None
    git_sha1: Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")] | None = None


def wanted_files(name: HubName, there: Iterable[HubFile]) -> list[HubFile]:
    """Those of the files that are there that the model is served from.

    Raises UnsupportedModel, saying what is there instead, if that is no model.
    """
    plain = [file for file in there if _PLAIN.fullmatch(file.name)]
    files = {file.name: file for file in plain if len(file.name.encode()) <= _LONGEST}
    if name.file is not None:
        return _one_file(name, name.file, files)
    if "config.json" not in files:
        single = sorted(each for each in files if each.endswith((".gguf", ".onnx")))
        instead = f"; it has {', '.join(single[:5])}: name one, as {name.repo}:{single[0]}" if single else ""
        raise UnsupportedModel(f"{name} has no config.json, so it is no model in the form of transformers{instead}")
    weights = [WEIGHTS] if WEIGHTS in files else sorted(filter(_SHARD.fullmatch, files))
    if not weights:
        raise UnsupportedModel(f"{name} has no model.safetensors{_other_weights(files)}")
    others = [each for each in files if _SETTINGS.fullmatch(each) and (each != WEIGHTS_INDEX or weights != [WEIGHTS])]
    modules = [each for each in files if _MODULE.fullmatch(each)] if "modules.json" in files else []
    chosen = [*sorted(others), *sorted(modules), *weights]
    if len(chosen) > MAX_FILES:
        raise UnsupportedModel(f"{name} has {len(chosen)} files, more than the {MAX_FILES} that a model may have")
    return [files[each] for each in chosen]


def _one_file(name: HubName, wanted: str, files: dict[str, HubFile]) -> list[HubFile]:
    """The file, what an ONNX file keeps its weights in beside it, and a GGUF file's other parts."""
    if wanted not in files:
        alike = sorted(each for each in files if each.endswith(wanted[wanted.rindex(".") :]))
        there = f"of its kind it has {', '.join(alike[:10])}" if alike else "it has none of its kind"
        raise UnsupportedModel(f"{name.repo} has no file {wanted!r}; {there}")
    beside = [each for each in (f"{wanted}_data", f"{wanted}.data") if each in files and wanted.endswith(".onnx")]
    return [files[each] for each in (*beside, *_other_parts(name, wanted, files), wanted)]


def _other_parts(name: HubName, wanted: str, files: Collection[str]) -> list[str]:
    """Of a GGUF file that is the first of several."""
    found = GGUF_PART.fullmatch(wanted)
    if found is None:
        return []
    count = int(found[3])
    if count > MAX_FILES:
        raise UnsupportedModel(f"{wanted!r} is in {count} parts, more than the {MAX_FILES} that a model may have")
    if int(found[2]) != 1 or not count:
        raise UnsupportedModel(f"{wanted!r} is not the first of its parts: name {part_name(found[1], 1, count)}")
    others = [part_name(found[1], number, count) for number in range(2, count + 1)]
    if missing := [each for each in others if each not in files]:
        raise UnsupportedModel(f"{name.repo} has {wanted!r}, but not its other part {missing[0]!r}")
    return others


def _other_weights(files: Iterable[str]) -> str:
    """What there is in place of safetensors, and what to do about it."""
    pickled = sorted(each for each in files if each.endswith((".bin", ".pt", ".pth")))
    if not pickled:
        return ", and no other weights"
    there = f", only {pickled[0]}, which can hold code and is not read"
    return f"{there}; where you trust it, download it to FOLDER and convert it: {conversion('FOLDER')}"
