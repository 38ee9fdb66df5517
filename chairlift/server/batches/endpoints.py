"""Which routes a batch may be for, and the models that answer there."""

import re
from collections.abc import Callable
from urllib.parse import unquote

from chairlift.errors import Unavailable
from chairlift.server.http.api_errors import ApiError
from chairlift.server.models.registry import Models, ModelService
from chairlift.server.oip.metadata import one_shot

_PREDICT = re.compile(r"/v1/models/(?P<name>[^?#]+):predict")

Find = Callable[[Models, str | None], ModelService]


def _llm(models: Models, name: str | None) -> ModelService:
    return models.llm(name, "this endpoint")


def _embedder(models: Models, name: str | None) -> ModelService:
    return models.one_shot(name, ("embed",), "this endpoint")


def _reranker(models: Models, name: str | None) -> ModelService:
    return models.one_shot(name, ("rerank",), "this endpoint")


_BY_PATH: dict[str, Find] = {
    "/v1/chat/completions": _llm,
    "/v1/completions": _llm,
    "/v1/embeddings": _embedder,
    "/v1/rerank": _reranker,
    "/rerank": _reranker,
}


class BatchEndpoint:
    """A route that batches may be for. Raises ApiError, 400 for any other and 404 for a model that is not served."""

    def __init__(self, path: str, models: Models) -> None:
        self.path = path
        self._models = models
        self._name: str | None = None
        if (match := _PREDICT.fullmatch(path)) is not None:
            self._name = unquote(match["name"])
            self._find: Find = _predictor
            self.model(None)
        elif path in _BY_PATH:
            self._find = _BY_PATH[path]
        else:
            allowed = ", ".join([*_BY_PATH, "/v1/models/NAME:predict"])
            raise ApiError(400, f"no batches for {path!r}; endpoint may be {allowed}", "endpoint", "invalid_endpoint")

    @property
    def bodies_name_models(self) -> bool:
        """Whether the model is in a line's body, or in the path."""
        return self._name is None

    def model(self, given: str | None) -> ModelService | None:
        """The model that answers a body that names it, or none; None if it is not known yet, as it is still loading.

        Raises ApiError if there is no such model, or it does something else.
        """
        try:
            return self._find(self._models, self._name or given)
        except Unavailable:
            return None


def _predictor(models: Models, name: str | None) -> ModelService:
    assert name is not None
    return one_shot(models, name, None)
