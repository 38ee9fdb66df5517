"""What OIP tells about the server and its models, whichever way it is asked."""

from typing import Any

from chairlift import __version__
from chairlift.config.server import ServerConfig
from chairlift.runners.items import TensorSpec
from chairlift.server.http.api_errors import without_folders
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models, ModelService, wrong_task
from chairlift.server.oip.tensor_items import shape_of, signature

# As Triton names them.
EXTENSIONS = (
    *("binary_tensor_data", "model_configuration", "model_repository"),
    *("model_repository(unload_dependents)", "schedule_policy", "statistics"),
)


def tensor_model(model: ModelService) -> ItemService:
    """The same model, which must take tensors. Raises ApiError where it is a language model."""
    if not isinstance(model, ItemService):
        raise wrong_task(model, ("tensors",), "the Open Inference Protocol")
    return model


def named_models(models: Models, name: str, version: str | None) -> list[ItemService]:
    """All versions of a model that takes tensors, or one of them; without a name those of all. Raises ApiError."""
    if not name:
        return [model for model in models.all() if isinstance(model, ItemService)]
    newest = tensor_model(models.get(name, version))
    return [newest] if version else [tensor_model(models.get(name, each)) for each in models.versions(name)]


def server_metadata(config: ServerConfig) -> dict[str, Any]:
    """Name, version and extensions."""
    shared = ("system_shared_memory",) if config.shared_memory else ()
    return {"name": "chairlift", "version": __version__, "extensions": (*EXTENSIONS, *shared)}


def model_metadata(models: Models, service: ItemService) -> dict[str, Any]:
    """A model's versions and tensors."""
    info = service.loaded()
    inputs, outputs = signature(info)

    def describe(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "datatype": spec.datatype, "shape": shape_of(spec, info.batch_axis)}

    return {
        "name": service.name,
        "versions": models.versions(service.name),
        "platform": f"chairlift_{info.task}",
        "inputs": [describe(spec) for spec in inputs],
        "outputs": [describe(spec) for spec in outputs],
    }


def index(models: Models, only_ready: bool) -> list[dict[str, str]]:
    """All models, with Triton's names for states."""
    entries = []
    for name, model in models.index():
        if model is None:
            entry = {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}
        else:
            state = _STATES.get(model.state, "UNAVAILABLE")
            reason = "" if model.ready else without_folders(model.failure or model.state)
            entry = {"name": name, "version": model.version, "state": state, "reason": reason}
        if not only_ready or entry["state"] == "READY":
            entries.append(entry)
    return entries


_STATES = {"ready": "READY", "loading": "LOADING", "restarting": "LOADING", "draining": "UNLOADING"}
