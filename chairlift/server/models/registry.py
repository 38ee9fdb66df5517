"""All models of a server, by name and version; how one is chosen for a request, loaded, and unloaded."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from starlette.requests import Request

from chairlift.errors import InvalidRequest, Unavailable
from chairlift.server.http.api_errors import ApiError
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.sequence_service import SequenceService

ModelService = SequenceService | ItemService

KINDS: dict[str, str] = {
    "generate": "a language model",
    "embed": "an embedding model",
    "classify": "a classifier",
    "rerank": "a reranker",
    "tensors": "a tensor model",
    "python": "a Python model",
}


class Loader(Protocol):
    """Brings models up and takes them down while the server runs."""

    def available(self) -> Sequence[str]:
        """Names that can be loaded, whether they are or not."""
        ...

    def problem(self) -> str | None:
        """What keeps this process from minding or hearing a model's worker, and which model; None: nothing."""
        ...

    async def load(self, name: str, changes: Mapping[str, Any]) -> Sequence[ModelService]:
        """All versions of a model, ready, with these settings instead of their own.

        Raises RequestFailed, or InvalidRequest for what can't be changed so.
        """
        ...

    async def unload(self, model: ModelService) -> None:
        """Let the model finish what it has, then close it."""
        ...


class Models:
    """The models that are served. Without a loader they stay the same as long as the server runs.

    `aliases` are further names of models, each with the name that the model has.
    """

    def __init__(
        self,
        models: Iterable[ModelService] = (),
        loader: Loader | None = None,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._models: dict[str, dict[str, ModelService]] = {}
        self._loader = loader
        self._aliases = aliases
        self._changing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        for model in models:
            self.add(model)

    def add(self, model: ModelService) -> None:
        """Serve a model, in place of one with the same name and version if there is one."""
        self._models.setdefault(model.name, {})[model.version] = model

    def all(self) -> list[ModelService]:
        """All models and versions."""
        return [model for versions in self._models.values() for model in versions.values()]

    def versions(self, name: str) -> list[str]:
        """A model's versions, oldest first."""
        return sorted(self._versions(name), key=_version_order)

    def names(self) -> list[str]:
        """What clients may send as `model`: the names of all models, then their aliases."""
        return [*self._models, *(alias for alias, name in self._aliases.items() if name in self._models)]

    def _versions(self, name: str) -> dict[str, ModelService]:
        return self._models.get(self._aliases.get(name, name), {})

    @property
    def ready(self) -> bool:
        """Whether every model takes requests, but for those that have failed; these wait for nothing any more."""
        states = {model.state for model in self.all()}
        return states <= {"ready", "failed"} and states != {"failed"}

    @property
    def changeable(self) -> bool:
        """Whether models can come and go while the server runs."""
        return self._loader is not None

    @property
    def problem(self) -> str | None:
        """What keeps this process from minding or hearing a model's worker, and which model; None: nothing."""
        return self._loader.problem() if self._loader is not None else None

    def find(self, name: str) -> ModelService | None:
        """A model by name, its newest version, or None."""
        versions = self._versions(name)
        if not versions:
            return None
        return next(iter(versions.values())) if len(versions) == 1 else versions[self.versions(name)[-1]]

    def get(self, name: str, version: str | None = None) -> ModelService:
        """A model by name, the newest version if none is given. Raises a 404 that says what is served."""
        newest, versions = self.find(name), self._versions(name)
        if newest is None:
            served = ", ".join(f"`{each}`" for each in self.names()) or "no model"
            message = f"The model `{name}` does not exist. This server has {served}."
            raise ApiError(404, message, "model", "model_not_found")
        if not version:
            return newest
        if version not in versions:
            message = f"The model `{name}` has no version {version!r}. It has {', '.join(self.versions(name))}."
            raise ApiError(404, message, "model", "model_not_found")
        return versions[version]

    def item_model(self, name: str | None, tasks: Collection[str], route: str) -> ItemService:
        """The named model, or the only one that does one of the tasks. Raises a 400 if it does something else."""
        model = self.get(name) if name else self._only(tasks)
        if isinstance(model, ItemService) and model.task is None:
            model.loaded()
        if not isinstance(model, ItemService) or model.task not in tasks:
            raise wrong_task(model, tasks, route)
        return model

    def language_model(self, name: str | None, route: str) -> SequenceService:
        """The named language model, or the only one."""
        model = self.get(name) if name else self._only(("generate",))
        if not isinstance(model, SequenceService):
            raise wrong_task(model, ("generate",), route)
        return model

    def _only(self, tasks: Collection[str]) -> ModelService:
        """The default: the model that does one of the tasks, if there is only one."""
        able = {model.name for model in self.all() if model.task in tasks}
        if len(able) == 1:
            return self.get(able.pop())
        wanted = " or ".join(KINDS[task] for task in tasks)
        if not able and any(model.task is None for model in self.all()):
            raise Unavailable(f"no model that has loaded so far is {wanted}")
        if not able:
            raise ApiError(404, f"This server has no model that is {wanted}.", "model", "model_not_found")
        raise InvalidRequest(f"name a model: this server has {', '.join(sorted(able))}", "model")

    def index(self) -> list[tuple[str, ModelService | None]]:
        """All names, also those that could be loaded: with None where they are not."""
        found: list[tuple[str, ModelService | None]] = [(model.name, model) for model in self.all()]
        available = self._loader.available() if self._loader is not None else ()
        return found + [(name, None) for name in available if name not in self._models]

    async def load(self, name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Load a model, or load it anew: the old one serves until the new one is ready.

        The `changes` are settings that hold instead of its own, until it is loaded once more.
        """
        name = self._aliases.get(name, name)
        loader = self._need_loader(name)
        async with self._changing:
            before = dict(self._models.get(name, {}))
            for model in await loader.load(name, changes):
                self.add(model)
            await self._retire(loader, before.values())

    async def unload(self, name: str) -> None:
        """Take all versions of a model out of service, if it is in; what they have begun is finished."""
        name = self._aliases.get(name, name)
        loader = self._need_loader(name)
        async with self._changing:
            await self._retire(loader, self._models.pop(name, {}).values())

    async def _retire(self, loader: Loader, models: Iterable[ModelService]) -> None:
        """Unload what nobody can ask for any more, to the end, even if whoever wanted that does not wait for it."""

        async def unload() -> None:
            for model in models:
                await loader.unload(model)

        task = asyncio.create_task(unload(), name="unload")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        await asyncio.shield(task)

    def _need_loader(self, name: str) -> Loader:
        if self._loader is None:
            raise InvalidRequest("this server loads and unloads no models while it runs")
        if name not in self._loader.available():
            raise ApiError(404, f"there is no model `{name}` to load", "model", "model_not_found")
        return self._loader


def models_of(request: Request) -> Models:
    """The models of the server that has the request."""
    models: Models = request.app.state.models
    return models


def model_in_path(request: Request, name: str, version: str | None = None) -> ModelService:
    """The model that a path names. Raises a 404, of what is no model or, after a model's name, of what is no route."""
    models = models_of(request)
    if models.find(name) is None and name.startswith(tuple(f"{each}{end}" for each in models.names() for end in "/:")):
        raise no_route(request)
    return models.get(name, version)


def no_route(request: Request, hint: str = "") -> ApiError:
    """The refusal of a path that leads nowhere, with what may be meant."""
    return ApiError(404, f"there is no {request.scope['path']} here{hint}", code="not_found")


def asked_model(request: Request, name: str | None) -> ItemService:
    """The model that a body names, or the only one that does what the route is for. Raises ApiError."""
    return models_of(request).item_model(name, request.scope["endpoint"].row.tasks, request.scope["path"])


def wrong_task(model: ModelService, tasks: Collection[str], route: str) -> ApiError:
    """What to say when a model can't do what a route is for."""
    wanted = " or ".join(KINDS[task] for task in tasks)
    is_a = KINDS[model.task] if model.task is not None else "not loaded"
    way = ""
    if model.task == "generate" and "embed" in tasks:
        way = '; its folder embeds where it is served with kind = "encoder"'
    elif model.task == "generate" and "rerank" in tasks:
        way = "; a language model's folder reranks where its modules.json has a LogitScore module"
    return ApiError(400, f"`{model.name}` is {is_a}; {route} needs {wanted}{way}", "model", "wrong_task")


def _version_order(version: str) -> tuple[int, str]:
    return (int(version), version) if version.isdecimal() else (-1, version)
