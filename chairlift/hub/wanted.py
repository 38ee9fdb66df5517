"""Which files of a repository a model needs: weights once and as safetensors, tokenizer, templates, settings."""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from chairlift.errors import UnsupportedModel, clip
from chairlift.folders.tensor_files import WEIGHTS, WEIGHTS_INDEX, all_parts, conversion
from chairlift.gguf.part_names import GGUF_PART, part_name
from chairlift.hub.name import HubName

# More than these are no model's, and would only take time and disk.
MAX_FILES = 2_000
_SETTINGS = re.compile(
    r"[\w.-]+\.(json|jinja)|vocab\.txt|merges\.txt|tokenizer\.model|additional_chat_templates/[\w-]+\.jinja"
)
# Where the modules of sentence-transformers are named, what each keeps in a folder of its own, and which have weights.
_MODULES, _OWN, _WITH_WEIGHTS = "modules.json", ("config.json", WEIGHTS), ("Dense", "LayerNorm")
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

    @property
    def goes_on(self) -> bool:
        """Whether what came of it may be kept for another try: size and hash tell when it is whole, and if it is right.

        Those with git's hash alone are small, and may come packed, of which no part can be asked for.
        """
        return self.size is not None and self.sha256 is not None


# What a JSON file of the repository holds, which is downloaded for that.
Read = Callable[[HubFile], Any]


def wanted_files(name: HubName, there: Iterable[HubFile], read: Read) -> list[HubFile]:
    """Those of the files that are there that the model is served from.

    Raises UnsupportedModel, saying what is there instead, if that is no model, or what it lacks.
    """
    plain = [file for file in there if _PLAIN.fullmatch(file.name)]
    files = {file.name: file for file in plain if len(file.name.encode()) <= _LONGEST}
    if name.file is not None:
        return _one_file(name, name.file, files)
    if "config.json" not in files:
        problem = f"{name} has no config.json, so it is no model in the form of transformers"
        raise UnsupportedModel(f"{problem}{_single_files(name, files)}")
    weights = [WEIGHTS] if WEIGHTS in files else _shards(name, files, read)
    if not weights:
        raise UnsupportedModel(f"{name} has no {WEIGHTS}{_other_weights(name, files)}")
    others = [each for each in files if _SETTINGS.fullmatch(each) and (each != WEIGHTS_INDEX or weights != [WEIGHTS])]
    chosen = [*sorted(others), *_of_modules(name, files, read), *weights]
    if len(chosen) > MAX_FILES:
        raise UnsupportedModel(f"{name} has {len(chosen)} files, more than the {MAX_FILES} that a model may have")
    return [files[each] for each in chosen]


def _shards(name: HubName, files: dict[str, HubFile], read: Read) -> list[str]:
    """The files that the index names; without one those that are called as parts are, of which none may lack."""
    if WEIGHTS_INDEX not in files:
        return all_parts(name, files)
    index = read(files[WEIGHTS_INDEX])
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
        problem = f"{WEIGHTS_INDEX} of {name} has no readable weight_map"
        raise UnsupportedModel(f"{problem}: it must be an object of tensors and their files")
    found = sorted(set(named.values()))
    for each in found:
        if each not in files or not each.endswith(".safetensors"):
            problem = f"{WEIGHTS_INDEX} of {name} names {clip(repr(each), 100)}"
            raise UnsupportedModel(f"{problem}, which is no file of safetensors that the repository has")
    return found


def _of_modules(name: HubName, files: dict[str, HubFile], read: Read) -> list[str]:
    """What the modules of sentence-transformers keep in folders of their own."""
    if _MODULES not in files:
        return []
    try:
        modules = [
            (str(each["type"]).rsplit(".", 1)[-1], PurePosixPath(each["path"])) for each in read(files[_MODULES])
        ]
    except (TypeError, KeyError):
        raise UnsupportedModel(f"{_MODULES} of {name} must be a list of modules, each with type and path") from None
    found: set[str] = set()
    for kind, path in modules:
        # The model's own are wanted anyway.
        own = [str(path / each) for each in _OWN] if path.parts and not kind.endswith("Transformer") else []
        needed = own if kind in _WITH_WEIGHTS else own[:1]
        for each in needed:
            if each not in files and kind != "Normalize":
                raise UnsupportedModel(f"{name} has no {clip(repr(each), 100)}, which a {clip(kind, 40)} module needs")
        found.update(each for each in own if each in files)
    return sorted(found)


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


def _single_files(name: HubName, files: Iterable[str]) -> str:
    """Models in one file that there are, and how they are named."""
    single = sorted(each for each in files if each.endswith((".gguf", ".onnx")))
    return f"; it has {', '.join(single[:5])}: name one, as {name.repo}:{single[0]}" if single else ""


def _other_weights(name: HubName, files: Iterable[str]) -> str:
    """What there is in place of safetensors, and what to do about it."""
    pickled = sorted(each for each in files if each.endswith((".bin", ".pt", ".pth")))
    if not pickled:
        return _single_files(name, files) or ", and no other weights"
    there = f", only {pickled[0]}, which can hold code and is not read"
    return f"{there}; where you trust it, download it to FOLDER and convert it: {conversion('FOLDER')}"
