"""The files that sentence-transformers keeps beside a model's weights."""

from collections.abc import Callable, Mapping, Sequence
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
# What makes scores of logits, as `SentenceFiles.activation` names it.
_SCORE_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid"}
# By these of config.json it is known as well, and goes first.
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# What modules make a score of a language model's logits.
_LOGIT_SCORE = ["Transformer", "LogitScore"]
# Modules that make a weight of each word; the former are of folders saved before version 5.4.
_SPLADES = (["MLMTransformer", "SpladePooling"], ["Transformer", "SpladePooling"])
# Where modules keep what they make of a text.
_VECTOR = "sentence_embedding"
_ON_VECTORS = {"module_input_name": _VECTOR, "module_output_name": _VECTOR}
_MOST_PROMPTS = 1000
# Arguments of a chat template that are none: they cut or pad what it gives.
_CUTTING = {"max_length", "truncation", "padding", "pad_to_multiple_of"}
# Or have it end elsewhere.
_CONTINUE = "continue_final_message"
# And those of a tokenizer that make no other tokens.
_LENGTHS = _CUTTING | {"padding_side", "return_tensors"}


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection of pooled vectors: where its weights are, its sizes, whether it has a bias, its activation, and
    whether what it makes are scores."""

    folder: Path
    ins: int
    outs: int
    bias: bool
    activation: str | None
    scores: bool


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """A norm of pooled vectors: where its weights are, and its size."""

    folder: Path
    ins: int

    @property
    def outs(self) -> int:
        """As many as it takes."""
        return self.ins


Stages = tuple[Dense | LayerNorm, ...]


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
class ChatFormat:
    """How texts are messages of a chat: the template's other `arguments`, and whether messages have `parts` instead of
    a text."""

    parts: bool
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What sentence-transformers keeps of a model; without any of its files nothing is normalized.

    Several `poolings` are concatenated; there are none if the folder does not say. `stages` are what is made of the
    pooled vectors one after the other. `max_tokens` counts special tokens; None if the folder does not say. `prompts`
    go in front of texts, by name, and `default_prompt` names the one that is used unasked. Where texts are messages of
    a `chat`, a text is what a user says in it, a pair a query and a document, and a prompt what the system says.
    `judges` is whether texts and pairs get scores or classes. `activation` is what makes those of logits where files or
    older fields of config.json say so: "sigmoid" or "none". Not of a `logit_score`, which vLLM makes a probability.
    """

    poolings: tuple[str, ...] = ()
    stages: Stages = ()
    normalized: bool = False
    max_tokens: int | None = None
    lowercase: bool = False
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    logit_score: LogitScore | None = None
    chat: ChatFormat | None = None
    judges: bool = False
    activation: str | None = None

    @property
    def num_scores(self) -> int | None:
        """How many scores modules make of a text or pair; None if they make vectors, or leave it to the model."""
        return 1 if self.logit_score is not None else _num_scores(self.stages)

    def width(self, hidden_size: int) -> int:
        """How many numbers modules make of tokens' so many. Raises UnsupportedModel if one takes other than it gets."""
        width = hidden_size * max(len(self.poolings), 1)
        for stage in self.stages:
            if stage.ins != width:
                raise UnsupportedModel(f"{stage.folder} takes {stage.ins} numbers by its config.json, and gets {width}")
            width = stage.outs
        return width

    @classmethod
    def read(cls, folder: Path) -> "SentenceFiles":
        """Read the files that are there. Raises UnsupportedModel naming what Chairlift does not do."""
        settings: dict[str, Any] = {}
        for path in sorted(folder.glob("sentence_*_config.json")):
            settings |= read_object(path)
        poolings, stages, normalized = _read_modules(folder, settings)
        prompts, default_prompt = _read_prompts(folder / "config_sentence_transformers.json")
        score = _read_logit_score(folder)
        judges = score is not None or _num_scores(stages) is not None
        raw = {} if judges else read_object(folder / "config.json")
        judges = judges or (not poolings and is_classifier(raw))
        heads = poolings == (SPLADE,) or (judges and not poolings)
        _check_modality(settings, "logits" if heads else "last_hidden_state", folder)
        return cls(
            poolings,
            stages,
            normalized,
            _read_max_tokens(folder, settings),
            bool(settings.get("do_lower_case")),
            prompts,
            default_prompt,
            score,
            _read_chat(settings, judges, score is not None),
            judges,
            _read_activation(folder, raw) if judges and score is None else None,
        )


def pools(folder: Path) -> bool:
    """Whether modules.json has something that makes one vector of a text's tokens."""
    return not {"Pooling", "SpladePooling"}.isdisjoint(kind for kind, _ in _modules(folder))


def scores_logits(folder: Path) -> bool:
    """Whether modules.json has something that makes a score of a language model's logits."""
    return any(kind == "LogitScore" for kind, _ in _modules(folder))


def _num_scores(stages: Stages) -> int | None:
    last = stages[-1] if stages else None
    return last.outs if isinstance(last, Dense) and last.scores else None


def _read_max_tokens(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """The tokens of the longest text, if the folder says. Raises UnsupportedModel for other ways to make tokens."""
    name = "max_seq_length"
    given = settings.get(name)
    if given is None and (folder / "modules.json").is_file():
        # Since version 5.4 it is the tokenizer's own, which is 1e30 where there is none.
        name = "model_max_length"
        given = read_object(folder / "tokenizer_config.json").get(name)
        given = int(given) if isinstance(given, float) and given.is_integer() else given
    processing = optional_object(settings, "processing_kwargs")
    for part in ("text", "common"):
        arguments = optional_object(processing, part)
        if unknown := sorted(arguments.keys() - _LENGTHS):
            raise UnsupportedModel(f"processing_kwargs: {part}.{clip(unknown[0], 80)} is not supported")
        if arguments.get("max_length") is not None:
            name, given = f"processing_kwargs: {part}.max_length", arguments["max_length"]
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise UnsupportedModel(f"{name} must be a positive whole number, got {clip(repr(given), 80)}")
    return given


def _read_logit_score(folder: Path) -> LogitScore | None:
    modules = _modules(folder)
    if [kind for kind, _ in modules] != _LOGIT_SCORE:
        return None
    path = modules[1][1] / "config.json"
    settings = read_object(path)
    _check_fields(settings, {"module_input_name": "causal_logits"}, path)
    false_id = None if settings.get("false_token_id") is None else _token_id(settings, "false_token_id", path)
    return LogitScore(_token_id(settings, "true_token_id", path), false_id)


def _token_id(settings: Mapping[str, Any], name: str, path: Path) -> int:
    given = settings.get(name)
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise UnsupportedModel(f"{path}: {name} must be the id of a token, got {clip(repr(given), 80)}")
    return given


def _check_modality(settings: Mapping[str, Any], output: str, folder: Path) -> None:
    """Raise UnsupportedModel for a Transformer that takes no texts, or gives other than this `output` of its model."""
    modalities = optional_object(settings, "modality_config")
    if modalities and not {"text", "message"}.intersection(modalities):
        known = clip(", ".join(modalities), 80)
        raise UnsupportedModel(f"modality_config has {known}; only models that take a text or message are supported")
    entry = optional_object(modalities, "message" if "message" in modalities else "text")
    supported = {"method": "forward", "method_output_name": output}
    _check_fields(entry, supported, folder / "sentence_bert_config.json")


def _read_chat(settings: Mapping[str, Any], judges: bool, scores: bool) -> ChatFormat | None:
    """How texts are messages, by sentence_bert_config.json; None where they are texts. Raises UnsupportedModel.

    Where it does not say, those of a language model that `scores` are.
    """
    modalities = optional_object(settings, "modality_config")
    if not ("message" in modalities if modalities else scores):
        return None
    form = optional_object(modalities, "message").get("format", "flat")
    if form not in ("flat", "structured"):
        known = "flat and structured are"
        raise UnsupportedModel(f"modality_config: format {clip(repr(form), 80)} is not supported; {known}")
    if settings.get("do_lower_case"):
        raise UnsupportedModel("do_lower_case is not supported where modality_config has a message; remove it")
    given = optional_object(settings, "processing_kwargs")
    arguments = dict(optional_object(given, "chat_template"))
    refused = [name for name, value in given.items() if judges and name != "chat_template" and value]
    refused += [f"chat_template.{name}" for name in sorted(_CUTTING.intersection(arguments))]
    if arguments.pop(_CONTINUE, False):
        refused.append(f"chat_template.{_CONTINUE}")
    if not arguments.pop("restore_suffix", True):
        refused.append("chat_template.restore_suffix")
    if refused:
        raise UnsupportedModel(f"processing_kwargs: {refused[0]} is not supported; remove it")
    return ChatFormat(form == "structured", arguments)


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """The texts by name, and which of them is the default."""
    settings = read_object(path)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise UnsupportedModel(f"{path}: prompts must be an object of texts, got {clip(repr(prompts), 80)}")
    if len(prompts) > _MOST_PROMPTS:
        problem = f"{path}: prompts has {len(prompts)} texts"
        raise UnsupportedModel(f"{problem}; models of up to {_MOST_PROMPTS} are supported")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        known = clip(", ".join(prompts) or "there are none", 200)
        raise UnsupportedModel(
            f"{path}: default_prompt_name {clip(repr(default), 80)} must be one of the prompts: {known}"
        )
    return prompts, default


def _read_activation(folder: Path, raw: Mapping[str, Any]) -> str | None:
    """What makes scores of logits by its file, or by what older versions put into a parsed config.json; None if neither
    says. Raises UnsupportedModel for another function."""
    if raw.get("problem_type") in _PROBLEM_TYPES:
        return None
    own = optional_object(raw, "sentence_transformers")
    name = "config_sentence_transformers.json: activation_fn"
    given = read_object(folder / "config_sentence_transformers.json").get("activation_fn")
    if given is None and "activation_fn" in own:
        name, given = "config.json: sentence_transformers.activation_fn", own["activation_fn"]
    elif given is None:
        name = "config.json: sbert_ce_default_activation_function"
        given = raw.get("sbert_ce_default_activation_function")
    if given is None:
        return None
    function = given.rsplit(".", 1)[-1] if isinstance(given, str) and given.startswith("torch.nn.") else None
    if function not in _SCORE_ACTIVATIONS:
        known = " and ".join(f"torch.nn.{each}" for each in _SCORE_ACTIVATIONS)
        raise UnsupportedModel(f"{folder}: {name} {clip(repr(given), 80)} is not supported; {known} are")
    return _SCORE_ACTIVATIONS[function]


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


def _read_modules(folder: Path, settings: Mapping[str, Any]) -> tuple[tuple[str, ...], Stages, bool]:
    poolings: tuple[str, ...] = ()
    stages: Stages = ()
    normalized = False
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds in _SPLADES:
        _check_task(kinds, settings)
        path = modules[1][1] / "config.json"
        _check_fields(read_object(path), {"pooling_strategy": "max", "activation_function": "relu"}, path)
        return (SPLADE,), (), False
    if kinds == _LOGIT_SCORE:
        return (), (), False
    for index, (kind, path) in enumerate(modules):
        # A transformer comes first, and what follows the normalization would undo it.
        known = kind in ("Transformer", "Pooling", "Normalize", *_STAGES)
        if not known or (kind == "Transformer") != (index == 0):
            raise UnsupportedModel(
                f"modules.json: a {kind} module at place {index} is not supported; "
                "a Transformer, then Pooling, Dense, LayerNorm and Normalize, or LogitScore alone, are"
            )
        if normalized or _num_scores(stages) is not None:
            last = "Normalize" if normalized else "one that makes scores"
            raise UnsupportedModel(f"modules.json: a {kind} module after {last} is not supported")
        if kind == "Pooling" and (poolings or stages):
            raise UnsupportedModel("modules.json: a Pooling module is supported but once, and before Dense")
        if kind == "Pooling":
            poolings = _read_poolings(path / "config.json")
            _check_task(kinds, settings)
        elif kind == "Normalize":
            normalized = True
            _check_fields(read_object(path / "config.json"), _ON_VECTORS, path)
        elif kind in _STAGES:
            stages += (_STAGES[kind](path),)
    # A classifier needs none, which has a head of its own.
    if modules and not poolings and (len(modules) > 1 or not is_classifier(read_object(folder / "config.json"))):
        raise UnsupportedModel(
            "modules.json has no Pooling module; models that give a vector of each token (ColBERT) are not supported"
        )
    return poolings, stages, normalized


def _check_task(kinds: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a Transformer that gives what the module after it does not take."""
    wanted = "fill-mask" if "SpladePooling" in kinds else "feature-extraction"
    given = settings.get("transformer_task") or ("fill-mask" if kinds[0] == "MLMTransformer" else "feature-extraction")
    if given != wanted:
        problem = f"transformer_task = {clip(repr(given), 80)} is not supported with {kinds[1]}"
        raise UnsupportedModel(f"{problem}, only {wanted!r}")


def _check_fields(settings: Mapping[str, Any], supported: Mapping[str, Any], path: Path) -> None:
    """Raise UnsupportedModel for a field that is there with another value than the one that is supported."""
    for field, value in supported.items():
        if (given := settings.get(field)) not in (None, value):
            raise UnsupportedModel(f"{path}: {field} = {clip(repr(given), 80)} is not supported, only {value!r}")


def _read_poolings(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        # Saved with every such module: a copy or download that lacks it would pool otherwise, and nobody would notice.
        raise UnsupportedModel(f"{path} is missing, by which a Pooling module of modules.json pools")
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
    output = settings.get("module_output_name") or _VECTOR
    scores = output == "scores"
    _check_fields(settings, {"use_residual": False, "module_input_name": _VECTOR}, folder)
    if output not in (_VECTOR, "scores"):
        known = f"{_VECTOR} and scores are"
        raise UnsupportedModel(f"{folder}: module_output_name = {clip(repr(output), 80)} is not supported; {known}")
    ins, outs = _sizes(settings, ("in_features", "out_features"), folder)
    return Dense(folder, ins, outs, bool(settings.get("bias", True)), _DENSE_ACTIVATIONS[name], scores)


def _read_layer_norm(folder: Path) -> LayerNorm:
    (size,) = _sizes(read_object(folder / "config.json"), ("dimension",), folder)
    return LayerNorm(folder, size)


def _sizes(settings: Mapping[str, Any], names: Sequence[str], folder: Path) -> list[int]:
    problem = f"{folder}/config.json must give {' and '.join(names)}"
    try:
        sizes = [int(settings[name]) for name in names]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnsupportedModel(problem) from error
    if min(sizes) < 1:
        raise UnsupportedModel(f"{problem} above zero, got {min(sizes)}")
    return sizes


# How modules are read that make something of pooled vectors.
_STAGES: Mapping[str, Callable[[Path], Dense | LayerNorm]] = {"Dense": _read_dense, "LayerNorm": _read_layer_norm}
