"""Tokenizers out of GGUF metadata cut texts as those that the metadata was made of."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from chairlift.errors import UnsupportedModel
from chairlift.gguf import tokenizer_files as module
from chairlift.gguf.tokenizer_files import tokenizer_files
from chairlift.text.chat_template import ChatTemplate

TEXTS = [
    "Hello world! It's 12345 o'clock, WE'LL see.",
    "  two  spaces\tand\ttabs \n\n\nand lines \r\n end ",
    "def f(x):\n    return x**2 + 3.14159 # comment",
    "ünïcödé ǅ 漢字かな 한국어 العربية 🙂🙂 e\u0301",
    "हिन्दी में नमस्ते, கணினி",
    "<|begin|>special<|end|> and <not special>",
    "CamelCaseWords andMoreOfThem HTTPServer 1,000,000",
    "0123456789012 12 1234 x12345y 123456\n7",
    "",
    " ",
]
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|begin|>", "<|end|>"]


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    found = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in patterns]
    return pre_tokenizers.Sequence([*found, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CHINESE, _CHINESE_AND_MORE = r"[\u4e00-\u9fa5\u3040-\u30ff]+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As the tokenizers of GPT-2, SmolLM, Llama 3, LFM2, Qwen 2 and 3.5, Seed-OSS, OLMo 1, GLM 4, MPT, BLOOM, Falcon and
# DeepSeek have it in their tokenizer.json; those of DeepSeek LLM list their letters and signs.
RULES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": split(_LLAMA3),
    "qwen2": split(_LLAMA3.replace("{1,3}", "")),
    "deepseek-r1-qwen": split(_LLAMA3.replace("{1,3}", "")),
    "lfm2": split(_LLAMA3),
    # Letters with marks behind them are one word.
    "qwen35": split(
        _LLAMA3.replace("{1,3}", "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
    ),
    "seed-coder": split(_LLAMA3.replace("{1,3}", "").replace(r"\p{N}]+[\r\n]*|", r"\p{N}\r\n]+|")),
    "olmo": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "chatglm-bpe": split(_LLAMA3),
    "mpt": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bloom": split(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "deepseek-llm": split(
        "[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~\u3000-\u3002]+", r"\s+$", _CHINESE_AND_MORE, r"\p{N}"
    ),
    "deepseek-coder": split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_MORE, r"\p{N}"),
    "deepseek-v3": split(r"\p{N}{1,3}", _CHINESE, _V3),
    "hunyuan-dense": split(r"\p{N}{1,3}", _CHINESE, _V3),
    "minimax-m2": split(_GPT4O),
    "exaone-moe": split(
        _LLAMA3.replace("{1,3}", "")
        .replace(r"\p{L}+", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
        .replace(r"+[\r\n]*|\s*[\r\n]+", r"+[\r\n/]?|\s*[\r\n]")
    ),
    # Digits from the end of a number by threes.
    "afmoe": split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", r"[\u4e00-\u9fff\u3040-\u30ff\uac00-\ud7af]+", _V3),
}
# Those of Qwen, of OLMo 1 and of MPT begin by making one character of "e" and its accent.
_COMPOSING = ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo", "mpt")


def trained(rule: str) -> Tokenizer:
    found = Tokenizer(models.BPE(ignore_merges=rule in ("llama-bpe", "lfm2")))
    found.pre_tokenizer = RULES[rule]
    if rule in _COMPOSING:
        found.normalizer = normalizers.NFC()
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(TEXTS * 5, trainer)
    return found


def metadata_of(tokenizer: Tokenizer, rule: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def made(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(metadata, "m.gguf")["tokenizer.json"]))


@pytest.mark.parametrize("rule", RULES)
def test_byte_pairs(rule: str) -> None:
    wanted = trained(rule)
    found = made(metadata_of(wanted, rule) | {"tokenizer.ggml.add_bos_token": False})
    for text in TEXTS:
        assert found.encode(text).ids == wanted.encode(text).ids, text
        ids = wanted.encode(text).ids
        for skips in (True, False):
            assert found.decode(ids, skip_special_tokens=skips) == wanted.decode(ids, skip_special_tokens=skips)


def sentence_pieces(prefix: bool) -> Tokenizer:
    """As Llama 2's and Gemma's tokenizer.json: merges of characters, and bytes for what is in no token."""
    found = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "\u2581")]
    found.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *spaces] if prefix else spaces)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    found.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = ["<unk>", *SPECIAL, *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, limit_alphabet=60, show_progress=False)
    found.train_from_iterator(TEXTS[:4] * 5, trainer)
    found.post_processor = processors.TemplateProcessing("<|begin|> $A", "<|begin|> $A $B", [("<|begin|>", 1)])
    return found


def test_chatglm_3_s_tokenizer_is_refused() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "chatglm-spm", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre 'chatglm-spm' of m\.gguf is not read"):
        tokenizer_files(metadata, "m.gguf")


@pytest.mark.parametrize(("prefix", "listed"), [(True, False), (False, False), (False, True)])
def test_sentence_pieces(prefix: bool, listed: bool) -> None:
    """Merged by scores, or as files of Gemma 4 list it, whose texts have a beginning whatever these say."""
    wanted = sentence_pieces(prefix)
    model = json.loads(wanted.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merged = {"".join(pair): -float(number) for number, pair in enumerate(model["merges"])}
    kinds = [2 if token == "<unk>" else 3 if token in SPECIAL else 6 if token[:3] == "<0x" else 1 for token in tokens]
    # Bytes are no special tokens of a real tokenizer; here they were, so that they are there at all.
    whole = json.loads(wanted.to_str())
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["content"] in SPECIAL]
    wanted = Tokenizer.from_str(json.dumps(whole))
    gemma4 = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }
    found = made(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [merged.get(token, -1e6) for token in tokens],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": prefix,
        }
        | (gemma4 if listed else {})
    )
    for text in TEXTS:
        assert found.encode(text).ids == wanted.encode(text).ids, text
        assert found.decode(wanted.encode(text).ids) == wanted.decode(wanted.encode(text).ids)


def pieces(*tokens: str, **others: Any) -> dict[str, Any]:
    told = {"model": "llama", "tokens": list(tokens), "scores": [0.0] * len(tokens)} | others
    return {f"tokenizer.ggml.{key}": value for key, value in told.items()}


def test_the_work_that_scores_make_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made(pieces("a", "b" * 256))
    with pytest.raises(UnsupportedModel, match=r"tokens of m\.gguf has one of 257 characters, more than the 256"):
        made(pieces("a", "b" * 257))
    # One that is no text of the model is not taken apart.
    made(pieces("a", "b" * 257, token_type=[1, 3]))
    for scores in (["x", "y"], [1, 2], None):
        with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.scores .* is no list of numbers"):
            made(pieces("a", "b", scores=scores))
    for bound in ("_MOST_PLACES", "_MOST_PAIRS"):
        with monkeypatch.context() as patch:
            patch.setattr(module, bound, 5)
            made(pieces("a", "b", "ab"))
            with pytest.raises(UnsupportedModel, match=r"tokens of m\.gguf can be put together in more ways"):
                made(pieces("a", "aa", "aaa", "aaaa", "aaaaa"))


def test_what_is_beside_the_tokenizer() -> None:
    told = metadata_of(trained("llama-bpe"), "llama-bpe") | {"tokenizer.ggml.eot_token_id": 7}
    files = tokenizer_files(told, "m.gguf")
    assert files["generation_config.json"] == {"eos_token_id": [1, 7]}
    said = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "penalty_repeat": 1.1, "mirostat": 0}
    sampled = tokenizer_files(told | {f"general.sampling.{name}": value for name, value in said.items()}, "m.gguf")
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert sampled["generation_config.json"] == {"eos_token_id": [1, 7]} | expected
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": "{{ messages[0].content }}"}
    assert files["tokenizer_config.json"] == config
    ended = tokenizer_files(told | {"tokenizer.ggml.add_eos_token": True}, "m.gguf")
    assert ended["tokenizer_config.json"] == config | {"add_eos_token": True}
    assert tokenizer_files(told | {"tokenizer.ggml.add_eos_token": False}, "m.gguf") == files
    # By its rule such a tokenizer begins with a token, if nothing else is said.
    assert made(told).encode("a").ids[0] == 0
    assert made(told | {"tokenizer.ggml.add_bos_token": False}).encode("a").ids[0] != 0
    assert made(told | {"tokenizer.ggml.pre": "qwen2"}).encode("a").ids[0] != 0


def test_what_ends_a_turn_is_found_by_its_text_too() -> None:
    """As Phi 3's files have it: one end is named, and the others are words of a user's."""
    told = metadata_of(trained("llama-bpe"), "llama-bpe")
    more = ["<|user|>", "<|endoftext|>", "<end_of_turn>", "<think>"]
    first = len(told["tokenizer.ggml.tokens"])
    told["tokenizer.ggml.tokens"] += more
    told["tokenizer.ggml.token_type"] = [4 if kind == 3 else 1 for kind in told["tokenizer.ggml.token_type"]]
    told["tokenizer.ggml.token_type"] += [4, 4, 1, 4]
    told["tokenizer.ggml.eos_token_id"] = first + 1
    files = tokenizer_files(told, "m.gguf")
    assert files["generation_config.json"]["eos_token_id"] == [SPECIAL.index("<|end|>"), first + 1, first + 2]
    special = {each["content"] for each in files["tokenizer.json"]["added_tokens"] if each["special"]}
    assert special == {"<|end|>", *more[:3]}
    found = made(told)
    assert found.encode("a<end_of_turn>", add_special_tokens=False).ids[-1] == first + 2
    # Harmony's parts of answers end by what ends others' turns.
    told["tokenizer.ggml.tokens"][-3:] = ["<|return|>", "<|call|>", "<|message|>"]
    assert tokenizer_files(told, "m.gguf")["generation_config.json"]["eos_token_id"] == [first + 1, first + 2]


_PHI3 = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
_TURNS = "<s> <|user|>\nwhat\n is<|end|>\n\n<|assistant|>\n that </s>\nend<|endoftext|>\n<unk> x"


@pytest.mark.parametrize(
    "told", [{"general.name": "Phi-3-mini"}, {"general.architecture": "phi3"}, {"general.architecture": "phimoe"}, {}]
)
def test_phi_3_s_tokens_take_the_space_behind_them(told: dict[str, str]) -> None:
    """As its tokenizer.json says, and no GGUF file."""
    words = ["\n", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    wanted = Tokenizer(models.BPE({token: number for number, token in enumerate(_PHI3 + words)}, [], unk_token="<unk>"))
    wanted.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strips = [token for token in _PHI3 if told and token not in ("<unk>", "<s>", "<|endoftext|>")]
    wanted.add_special_tokens(
        [tokenizers.AddedToken(token, rstrip=token in strips, normalized=False) for token in _PHI3]
    )
    kinds = [3] * len(_PHI3) + [1] * len(words)
    found = made(pieces(*_PHI3, *words, token_type=kinds, add_bos_token=False) | told)
    assert found.encode(_TURNS).ids == wanted.encode(_TURNS).ids


def test_templates_that_have_a_name_are_there_beside_the_default() -> None:
    told = metadata_of(trained("gpt-2"), "gpt-2") | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    told |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.rag": 3}
    config = tokenizer_files(told, "m.gguf")["tokenizer_config.json"]
    assert ChatTemplate.from_folder(Path("none"), config, {}).source == "{{ tools }}\n{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokens", ["a", "a"], "a token twice"),
        ("tokens", [1, 2], "no list of texts"),
        ("token_type", [1], "token_type"),
        ("merges", ["ab"], "no pair"),
        ("pre", 7, "pre 7"),
        ("pre", "mystery", "pre 'mystery'"),
        ("bos_token_id", -1, "bos_token_id"),
        ("bos_token_id", True, "bos_token_id"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object, said: str) -> None:
    told = metadata_of(trained("gpt-2"), "gpt-2")
    told = {"tokenizer.ggml.token_type": None} | told | {f"tokenizer.ggml.{key}": value}
    if key == "tokens":
        told["tokenizer.ggml.token_type"] = None
    with pytest.raises(UnsupportedModel) as refused:
        tokenizer_files(told, "m.gguf")
    assert said in str(refused.value)
