"""The files that sentence-transformers keeps beside a model's weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigError, UnsupportedModel, clip
from chairlift.folders.model_json import (
    inside,
    is_classifier,
    optional_object,
    read_json,
    read_object,
)

# What a head that guesses words makes of all tokens, a number for each word: no pooling of hidden states.
SPLADE = "splade"
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# As older files have them, in the order in which several are concatenated.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
# What modules make a score of a language model's logits.
_LOGIT_SCORE = ["Transformer", "LogitScore"]
# Arguments of a chat template that are none: they cut or pad what it gives.
_CUTTING = {"max_length", "truncation", "padding", "pad_to_multiple_of"}


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection of pooled vectors: where its weights are, its sizes, whether it has a bias, its activation."""

    folder: Path
    ins: int
    outs: int
    bias: bool
    activation: str | None


@dataclass(frozen=True, slots=True)
class LogitScore:
    """A language model's score: the logit of `true_id` as the next token, less that of `false_id`, if there is one."""

    true_id: int
    false_id: int | None

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose logits it is made of."""
        return [self.true_id] if self.false_id is None else [self.true_id, self.false_id]


@dataclass(frozen=True, slots=True)
class PairMessages:
    """How a pair of texts is a chat, of a query and a document: the template's other `arguments`, and whether messages
    have `parts` instead of a text."""

    parts: bool
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What sentence-transformers keeps of a model; without any of its files nothing is normalized.

    Several `poolings` are concatenated; there are none if the folder does not say. `max_tokens` counts special tokens;
    None if the folder does not say. `prompts` go in front of texts, by name, and `default_prompt` names the one that
    is used unasked. Where `pairs` are chats, it is what the system says in them.
    """

    poolings: tuple[str, ...] = ()
    dense: tuple[Dense, ...] = ()
    normalized: bool = False
    max_tokens: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    logit_score: LogitScore | None = None
    pairs: PairMessages | None = None

    @property
    def prompt(self) -> str | None:
        """The text of the default prompt, if there is one."""
        return None if self.default_prompt is None else (self.prompts or {})[self.default_prompt]

    @classmethod
    def read(cls, folder: Path) -> "SentenceFiles":
        """Read the files that are there. Raises UnsupportedModel naming what Chairlift does not do."""
        poolings, dense, normalized = _read_modules(folder)
        prompts, default_prompt = _read_prompts(folder / "config_sentence_transformers.json")
        limits: dict[str, Any] = {}
        for path in sorted(folder.glob("sentence_*_config.json")):
            limits |= read_object(path)
        max_tokens = limits.get("max_seq_length")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise UnsupportedModel(f"max_seq_length must be a positive whole number, got {max_tokens!r}")
        score = _read_logit_score(folder)
        judges = score is not None or (not poolings and is_classifier(read_object(folder / "config.json")))
        return cls(
            poolings,
            dense,
            normalized,
            max_tokens,
            bool(limits.get("do_lower_case")),
            prompts,
            default_prompt,
            score,
            _read_pairs(limits, score is not None) if judges else None,
        )


def pools(folder: Path) -> bool:
    """Whether modules.json has something that makes one vector of a text's tokens."""
    return not {"Pooling", "SpladePooling"}.isdisjoint(kind for kind, _ in _modules(folder))


def scores_logits(folder: Path) -> bool:
    """Whether modules.json has something that makes a score of a language model's logits."""
    return any(kind == "LogitScore" for kind, _ in _modules(folder))


def _read_logit_score(folder: Path) -> LogitScore | None:
    modules = _modules(folder)
    if [kind for kind, _ in modules] != _LOGIT_SCORE:
        return None
    path = modules[1][1] / "config.json"
    settings = read_object(path)
    if (given := settings.get("module_input_name", "causal_logits")) != "causal_logits":
        raise UnsupportedModel(f"{path}: module_input_name = {given!r} is not supported, only 'causal_logits'")
    false_id = None if settings.get("false_token_id") is None else _token_id(settings, "false_token_id", path)
    return LogitScore(_token_id(settings, "true_token_id", path), false_id)


def _token_id(settings: Mapping[str, Any], name: str, path: Path) -> int:
    given = settings.get(name)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise UnsupportedModel(f"{path}: {name} must be the id of a token, got {clip(repr(given), 80)}")
    return given


def _read_pairs(settings: Mapping[str, Any], scores: bool) -> PairMessages | None:
    """How pairs are chats, by sentence_bert_config.json; None where they are two texts. Raises UnsupportedModel.

    Where it does not say, those of a language model that `scores` them are.
    """
    modalities = optional_object(settings, "modality_config")
    if not ("message" in modalities if modalities else scores):
        return None
    form = optional_object(modalities, "message").get("format", "flat")
    if form not in ("flat", "structured"):
        known = "flat and structured are"
        raise UnsupportedModel(f"modality_config: format {clip(repr(form), 80)} is not supported; {known}")
    given = optional_object(settings, "processing_kwargs")
    arguments = dict(optional_object(given, "chat_template"))
    refused = [name for name, value in given.items() if name != "chat_template" and value]
    refused += [f"chat_template.{name}" for name in sorted(_CUTTING.intersection(arguments))]
    if not arguments.pop("restore_suffix", True):
        refused.append("chat_template.restore_suffix")
    if refused:
        raise UnsupportedModel(f"processing_kwargs: {refused[0]} is not supported; remove it")
    return PairMessages(form == "structured", arguments)


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """The texts by name, and which of them is the default."""
    settings = read_object(path)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UnsupportedModel(f"{path}: prompts must be an object of texts, got {clip(repr(prompts), 80)}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        known = clip(", ".join(prompts) or "there are none", 200)
        raise UnsupportedModel(
            f"{path}: default_prompt_name {clip(repr(default), 80)} must be one of the prompts: {known}"
        )
    return prompts, default


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module, in their order."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    found = read_json(path)
    try:
        return [(str(module["type"]).rsplit(".", 1)[-1], inside(folder, module["path"], path)) for module in found]
    except (TypeError, KeyError) as error:
        raise ConfigError(f"model: {path} must be a list of modules, each with type and path") from error


def _read_modules(folder: Path) -> tuple[tuple[str, ...], tuple[Dense, ...], bool]:
    poolings: tuple[str, ...] = ()
    dense: list[Dense] = []
    normalized = False
    modules = _modules(folder)
    if [kind for kind, _ in modules] == ["MLMTransformer", "SpladePooling"]:
        _check_splade(modules[1][1] / "config.json")
        return (SPLADE,), (), False
    if [kind for kind, _ in modules] == _LOGIT_SCORE:
        return (), (), False
    for index, (kind, path) in enumerate(modules):
        # A transformer comes first, and what follows the normalization would undo it.
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize") or (kind == "Transformer") != (index == 0):
            raise UnsupportedModel(
                f"modules.json: a {kind} module at place {index} is not supported; "
                "a Transformer, then Pooling, Dense and Normalize, or LogitScore alone, are"
            )
        if normalized:
            raise UnsupportedModel(f"modules.json: a {kind} module after Normalize is not supported")
        if kind == "Pooling" and (poolings or dense):
            raise UnsupportedModel("modules.json: a Pooling module is supported but once, and before Dense")
        if kind == "Pooling":
            poolings = _read_poolings(path / "config.json")
        elif kind == "Dense":
            dense.append(_read_dense(path))
        elif kind == "Normalize":
            normalized = True
    # A classifier needs none, which has a head of its own.
    if modules and not poolings and (len(modules) > 1 or not is_classifier(read_object(folder / "config.json"))):
        raise UnsupportedModel(
            "modules.json has no Pooling module; models that give a vector of each token (ColBERT) are not supported"
        )
    return poolings, tuple(dense), normalized


def _check_splade(path: Path) -> None:
    settings = read_object(path)
    for field, neutral in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if settings.get(field, neutral) != neutral:
            raise UnsupportedModel(f"{path}: {field} = {settings[field]!r} is not supported, only {neutral!r}")


def _read_poolings(path: Path) -> tuple[str, ...]:
    settings = read_object(path)
    if not settings.get("include_prompt", True):
        raise UnsupportedModel(f"{path}: include_prompt = false is not supported")
    given = settings.get("pooling_mode")
    if given is None:
        unknown = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on]
        unknown = [name for name in unknown if name not in _POOLING_FLAGS]
        given = unknown or [mode for flag, mode in _POOLING_FLAGS.items() if settings.get(flag)] or "mean"
    if not isinstance(given, str | list):
        raise UnsupportedModel(f"{path}: pooling_mode must be a name or a list of names, got {clip(repr(given), 80)}")
    poolings = (given,) if isinstance(given, str) else tuple(given)
    for pooling in poolings:
        if pooling not in POOLINGS:
            raise UnsupportedModel(f"{path}: pooling {pooling!r} is not supported; these are: {', '.join(POOLINGS)}")
    return poolings


def _read_dense(folder: Path) -> Dense:
    settings = read_object(folder / "config.json")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rsplit(".", 1)[-1]
    if name not in _DENSE_ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder}: activation_function {activation!r} is not supported; these are: {', '.join(_DENSE_ACTIVATIONS)}"
        )
    for field, neutral in (("use_residual", False), ("module_input_name", "sentence_embedding")):
        if settings.get(field, neutral) != neutral:
            raise UnsupportedModel(f"{folder}: {field} = {settings[field]!r} is not supported")
    try:
        ins, outs = int(settings["in_features"]), int(settings["out_features"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnsupportedModel(f"{folder}/config.json must give in_features and out_features") from error
    return Dense(folder, ins, outs, bool(settings.get("bias", True)), _DENSE_ACTIVATIONS[name])
