"""Where a model is that somebody names: a path or class on this machine, or a name of the Hub, which is fetched."""

from pathlib import Path

from chairlift.errors import ConfigError, DownloadFailed, looking_at
from chairlift.gguf.side_folder import folder_of, is_gguf
from chairlift.hub.name import hub_name


def fetched(model: str, revision: str | None) -> Path:
    """The folder or file of a model of the Hub, once it is here. Raises ConfigError or UnsupportedModel."""
    name = hub_name(model, revision)
    if name is None:
        raise ConfigError(
            f"model {model!r} is no folder or file here, and no name of the Hub, as organization/model; it may also be "
            "a .onnx file, or a class as module:Class"
        )
    # Only now: whoever names a path needs nothing of this.
    from chairlift.hub.download import Hub

    try:
        with looking_at(Path(model)):
            return Hub().fetch(name).path
    except DownloadFailed as error:
        raise ConfigError(f"model {model!r} is no folder here, and as a name of the Hub: {error}") from None


def located(model: str, revision: str | None = None) -> str:
    """A path as it is, or that of a model of the Hub, or the folder of a GGUF file.

    Raises ConfigError or UnsupportedModel.
    """
    path = Path(model)
    with looking_at(path):
        is_here = path.exists()
    if is_here:
        refuse_revision(model, revision)
    else:
        path = fetched(model, revision)
    if is_gguf(path):
        return str(folder_of(path))
    return str(path) if path != Path(model) else model


def refuse_revision(model: str, revision: str | None) -> None:
    """Raise ConfigError for a revision of what is on this machine already."""
    if revision is not None:
        raise ConfigError(f"revision has no effect on {model!r}, which is not of the Hub; leave it out")
