"""Which routes a batch may be for, and the models that answer there."""

from collections.abc import Iterable
from urllib.parse import unquote

from starlette.routing import compile_path

from chairlift.config.server import ServerConfig
from chairlift.errors import Unavailable
from chairlift.jobs.lines import ENVELOPE_BYTES
from chairlift.server.http.api_errors import ApiError, without_folders
from chairlift.server.http.endpoint import Endpoint
from chairlift.server.models.registry import Models, ModelService
from chairlift.server.oip.metadata import tensor_model

_ROUTE = "this endpoint"


class BatchEndpoints:
    """The rows of the table that batches may be for."""

    def __init__(self, table: Iterable[Endpoint], models: Models) -> None:
        self._rows = [(row, compile_path(row.path)) for row in table if row.batchable]
        self._models = models

    def find(self, path: str) -> "BatchEndpoint":
        """The one with a path. Raises ApiError, 400 for any other and 404 for a model in it that is not served."""
        endpoint = self.find_row(path)
        if not endpoint.bodies_name_models:
            endpoint.model(None)
        return endpoint

    def find_row(self, path: str) -> "BatchEndpoint":
        """The one with a path, whether or not a model in it is served. Raises a 400 for any other."""
        for row, (pattern, _, _) in self._rows:
            match = pattern.fullmatch(path)
            if match is None or "?" in path or "#" in path or not all(match.groups()):
                continue
            (name,) = match.groups() or (None,)
            return BatchEndpoint(path, row, self._models, name and unquote(name))
        allowed = ", ".join(shown.replace("{name}", "NAME") for _, (_, shown, _) in self._rows)
        raise ApiError(400, f"no batches for {path!r}; endpoint may be {allowed}", "endpoint", "invalid_endpoint")


class BatchEndpoint:
    """A path that a batch is for, and the row that serves it; `name` is the model's where the path has it."""

    def __init__(self, path: str, row: Endpoint, models: Models, name: str | None) -> None:
        self.path = path
        self._row = row
        self._models = models
        self._name = name

    @property
    def bodies_name_models(self) -> bool:
        """Whether the model is in a line's body, or in the path."""
        return self._name is None

    def max_line_bytes(self, config: ServerConfig) -> int:
        """The bytes of a line whose body is as long as any may be."""
        most = config.max_body_bytes
        if not self.bodies_name_models:
            most = max(most, min(config.max_tensor_bytes, config.max_tensor_json_bytes))
        return most + ENVELOPE_BYTES

    def model(self, given: str | None) -> ModelService | None:
        """The model that answers a body that names it, or none; None if it is not known yet, as it is still loading.

        Raises ApiError if there is no such model, or it does something else.
        """
        try:
            if self._name is not None:
                return tensor_model(self._models.get(self._name))
            if self._row.tasks == ("generate",):
                return self._models.language_model(given, _ROUTE)
            return self._models.item_model(given, self._row.tasks, _ROUTE)
        except Unavailable:
            return None

    def failure(self, given: str | None) -> str | None:
        """Why no model that may be meant will answer any more; None if one does, or may yet."""
        name = self._name or given
        meant = self._models.all() if name is None else [self._models.find(name)]
        failures = [each.failure or "it failed" for each in meant if each is not None and each.state == "failed"]
        return without_folders(failures[0]) if failures and len(failures) == len(meant) else None
