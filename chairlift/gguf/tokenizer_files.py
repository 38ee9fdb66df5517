"""tokenizer.json and its companions, made from a GGUF file's metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.word_rules import WORD_RULES, Json, byte_level, in_turn

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
# What no vocabulary of scores comes near: characters of a token, which SentencePiece makes of 16, places where all of
# them are looked at, and pairs that are found so. Gemma's has 1.7 million places and 0.6 million pairs.
_LONGEST, _MOST_PLACES, _MOST_PAIRS = 256, 2**23, 2**21
# Which texts byte pairs are sought in, by the name of the rule. What these say is what the models' own tokenizers have.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_THREE = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_BY_ONE_WITHOUT_LINES = rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_ONE = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
_BY_ONE_WITH_MARKS = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"{_FIRST}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_FIRST}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = byte_level(use_regex=True)
_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}
_RULES: dict[str, Json] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mellum", "exaone4", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), in_turn(_BY_THREE)
    ),
    "lfm2": in_turn(_BY_THREE),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), in_turn(_BY_ONE)),
    "qwen35": in_turn(_BY_ONE_WITH_MARKS),
    "seed-coder": in_turn(_BY_ONE_WITHOUT_LINES),
    "tekken": in_turn(_TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), in_turn(_GPT4O)),
    **WORD_RULES,
}
# Rules of tokenizers that take a whole word for one token if it is one, before they merge anything; and of those that
# begin with a token for the beginning unless they say otherwise.
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken", "gpt-4o", "llama4")
_WITH_BEGINNING = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")
_CHATGLM3, _GEMMA4 = "chatglm-spm", "gemma4"
# Rules of tokenizers that make one character of a letter and its accents before they cut a text.
_COMPOSING = ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo", "mpt", "command-r", "modern-bert")
# Tokens that end an answer, or mark whose turn it is, whatever type a file gives them: many name but one end and call
# the others words of a user's, and llama.cpp goes by their texts, too.
_ENDINGS_OF_TURNS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
_MARKS_OF_TURNS = (
    *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|start_of_role|>"),
    *("<|end_of_role|>", "<|system|>", "<|user|>", "<|assistant|>", "<|turn>"),
)
# Of Phi 3's tokens with names those that leave the white space behind them, by which llama.cpp goes, too.
_PHI3, _KEEP_SPACE = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
_TEMPLATE = "tokenizer.chat_template"
# What a file may say of sampling, and the names of that in generation_config.json.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def tokenizer_files(metadata: Mapping[str, Any], name: str) -> dict[str, Json]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json.

    `name` is the file's, for errors. Raises UnsupportedModel naming the key at fault.
    """
    told = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, kinds = list_of(told, "tokens", str, name), told.get("token_type")
    if kinds is None:
        kinds = [NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.token_type of {name} is not as long as its tokens")
    if len(set(tokens)) < len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.tokens of {name} has a token twice")
    endings = _endings(tokens)
    kinds = _with_special(tokens, kinds, endings)
    model = told.get("model")
    if model == "gpt2":
        made = byte_pairs(told, tokens, name)
    elif model in ("llama", _GEMMA4):
        made = _sentence_pieces(told, tokens, kinds, name)
    else:
        known = f"gpt2, llama and {_GEMMA4}"
        raise UnsupportedModel(f"tokenizer.ggml.model {shown(model)} of {name} is not read; these are: {known}")
    # Of Gemma 4 llama.cpp puts it before texts whatever a file says.
    begins = model == _GEMMA4 or told.get("add_bos_token", model == "llama" or told.get("pre") in _WITH_BEGINNING)
    bos = token_id(told, "bos_token_id", tokens, name)
    strips = _strips(metadata, model)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(number, token, kind == CONTROL, strips and token not in _KEEP_SPACE)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED) and token
        ],
        **made,
        "post_processor": _beginning(tokens[bos], bos) if begins and bos is not None else None,
    }
    ends = [token_id(told, f"{each}_token_id", tokens, name) for each in ("eos", "eot", "eom")]
    return {
        "tokenizer.json": whole,
        "tokenizer_config.json": _first_and_last(told, tokens, bos, ends[0]) | _templates(metadata),
        "generation_config.json": {
            "eos_token_id": sorted({each for each in (*ends, *endings) if each is not None}),
            **{ours: metadata[key] for key, ours in _SAMPLING.items() if key in metadata},
        },
    }


def _first_and_last(told: Mapping[str, Any], tokens: Sequence[str], bos: int | None, eos: int | None) -> Json:
    """The tokens for a text's beginning and end, and whether texts that are embedded end with the latter."""
    named: Json = {
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
    }
    return named | ({"add_eos_token": True} if told.get("add_eos_token") else {})


def _strips(metadata: Mapping[str, Any], model: Any) -> bool:
    """Whether tokens with names take the white space behind them, as Phi 3's do: files don't say so."""
    name = str(metadata.get("general.name")).lower()
    # Phi 4 and 4 mini are of the first architecture, too, and of another kind of tokenizer.
    is_phi3 = metadata.get("general.architecture") in ("phi3", "phimoe") and model == "llama"
    return is_phi3 or any(each in name for each in _PHI3)


def _templates(metadata: Mapping[str, Any]) -> Json:
    """Chat templates, as a list where any has a name."""
    found = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")) and isinstance(value, str)
    }
    if found.keys() == {"default"}:
        return {"chat_template": found["default"]}
    return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]} if found else {}


def _endings(tokens: Sequence[str]) -> list[int]:
    """Tokens whose text says that they end an answer. In Harmony `<|end|>` only ends a part of one."""
    numbers = {token: number for number, token in enumerate(tokens)}
    is_harmony = "<|return|>" in numbers and "<|call|>" in numbers
    return [numbers[each] for each in _ENDINGS_OF_TURNS if each in numbers and not (is_harmony and each == "<|end|>")]


def _with_special(tokens: Sequence[str], kinds: Sequence[int], endings: Sequence[int]) -> list[int]:
    """The types of tokens, with those that no text of a client's may stand for as control tokens."""
    made = list(kinds)
    for number in endings:
        made[number] = CONTROL
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == USER_DEFINED and token in _MARKS_OF_TURNS:
            made[number] = CONTROL
    return made


def byte_pairs(told: Mapping[str, Any], tokens: Sequence[str], name: str) -> Json:
    """A tokenizer that merges bytes, in words that its rule makes. Raises UnsupportedModel naming the key."""
    rule, pairs = told.get("pre"), _merges(told, name)
    if not isinstance(rule, str) or rule not in _RULES:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre {shown(rule)} of {name} is not read, by which texts are cut into words; these are: "
            f"{', '.join(_RULES)}"
        )
    return {
        "normalizer": {"type": "NFC"} if rule in _COMPOSING else None,
        "pre_tokenizer": _RULES[rule],
        "decoder": byte_level(use_regex=True) | {"add_prefix_space": True},
        "model": _bpe(tokens, pairs, ignore_merges=rule in _WHOLE_FIRST),
    }


def _sentence_pieces(told: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], name: str) -> Json:
    """A tokenizer that merges the pair whose whole has the highest score, as SentencePiece's BPE does.

    Files of Gemma 4 list what is merged instead.
    """
    is_listed = told.get("model") == _GEMMA4
    if told.get("pre") == _CHATGLM3:
        problem = f"tokenizer.ggml.pre {_CHATGLM3!r} of {name} is not read"
        raise UnsupportedModel(f"{problem}: such tokenizers put tokens before each text that no file tells of")
    pairs = _merges(told, name) if is_listed else _scored(told, tokens, kinds, name)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    begins = told.get("add_space_prefix", not is_listed)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if begins else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(tokens, pairs, unknown=unknown) | {"byte_fallback": _BYTE in kinds, "fuse_unk": True},
    }


def _scored(told: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], name: str) -> list[list[str]]:
    """What is merged by scores: of one score the pair of the earlier tokens first, as a list of merges means it."""
    scores = list_of(told, "scores", float, name)
    if len(scores) != len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.scores of {name} is not as long as its tokens")
    pairs = sorted(_pairs(tokens, [-score for score in scores], kinds, name))
    return [[tokens[left], tokens[right]] for _, left, right in pairs]


def _merges(told: Mapping[str, Any], name: str) -> list[list[str]]:
    """What is merged, as a file lists it. Raises UnsupportedModel naming the key."""
    pairs = [each.split(" ", 1) for each in list_of(told, "merges", str, name)]
    if any(len(pair) < 2 for pair in pairs):
        raise UnsupportedModel(f"tokenizer.ggml.merges of {name} has one that is no pair")
    return pairs


def _pairs(
    tokens: Sequence[str], ranks: Sequence[float], kinds: Sequence[int], name: str
) -> list[tuple[float, int, int]]:
    """The two tokens of each pair that make a third, behind the rank of that one."""
    numbers = {token: number for number, token in enumerate(tokens)}
    pairs: list[tuple[float, int, int]] = []
    num_places = 0
    for number, token in enumerate(tokens):
        if kinds[number] != NORMAL:
            continue
        if len(token) > _LONGEST:
            problem = f"tokenizer.ggml.tokens of {name} has one of {len(token)} characters"
            raise UnsupportedModel(f"{problem}, more than the {_LONGEST} that are read")
        num_places += len(token)
        if num_places > _MOST_PLACES or len(pairs) > _MOST_PAIRS:
            raise UnsupportedModel(f"tokenizer.ggml.tokens of {name} can be put together in more ways than are read")
        halves = ((numbers.get(token[:cut]), numbers.get(token[cut:])) for cut in range(1, len(token)))
        pairs += [(ranks[number], left, right) for left, right in halves if left is not None and right is not None]
    return pairs


def _bpe(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], *, ignore_merges: bool = False, unknown: str | None = None
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }


def added_token(number: int, token: str, special: bool, strips: bool) -> Json:
    """A token with a name as tokenizer.json lists it, which may take the white space behind it."""
    sides = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {"id": number, "content": token, **sides, "rstrip": strips, "special": special}


def _beginning(token: str, number: int) -> Json:
    """What puts a token before each text."""
    mark, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, text],
        "pair": [mark, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def token_id(told: Mapping[str, Any], key: str, tokens: Sequence[str], name: str) -> int | None:
    """The token that a key names, if it is there. Raises UnsupportedModel naming it for one that is none."""
    number = told.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.{key} of {name} is {shown(number)}, and there are {len(tokens)} tokens")
    return number


def list_of(told: Mapping[str, Any], key: str, kind: type, name: str) -> list[Any]:
    """The list of that kind that a key has. Raises UnsupportedModel naming it for anything else."""
    found = told.get(key)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        what = "texts" if kind is str else "numbers"
        raise UnsupportedModel(f"tokenizer.ggml.{key} is missing in {name}, or is no list of {what}")
    return found
