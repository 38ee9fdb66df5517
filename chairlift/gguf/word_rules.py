"""How tokenizers unlike GPT-2's and Llama 3's cut texts into words, by the names that GGUF files have for that."""

from typing import Any

Json = dict[str, Any]


def byte_level(use_regex: bool) -> Json:
    """A text's bytes as characters; cut as GPT-2's are, or as they come."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def in_turn(*patterns: str) -> Json:
    """What cuts by each pattern what those before it have left, and makes bytes of it."""
    cuts = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns]
    return {"type": "Sequence", "pretokenizers": [*cuts, byte_level(use_regex=False)]}


# Letters that are large or small in some alphabets, and in others not, as DeepSeek's first tokenizers list them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
# From where a run of them begins, which is where it would be found anyway: sought from each of them, ten thousand took
# most of a second.
_SPACE_AT_THE_END = r"(?<!\s)\s+$"
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS_OF_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of a number's digits the last three, and those before them, each; a run of them is cut off first, so that all this is
# read once and not from each digit to its end.
_THREES_FROM_THE_END = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)", r"\p{N}{1,3}")
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
# Letters, whose words may follow each other with a space between.
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_FALCON = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    byte_level(use_regex=True),
    {"type": "Digits", "individual_digits": False},
    {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
]
_ENDS_OF_BLOOM = ".,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
WORD_RULES: dict[str, Json] = {
    "deepseek-llm": in_turn(r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_SIGNS}]+", _SPACE_AT_THE_END, _CHINESE, r"\p{N}"),
    "deepseek-coder": in_turn(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), in_turn(r"\p{N}{1,3}", _HAN_AND_KANA, _WORDS_OF_V3)),
    "exaone-moe": in_turn(_EXAONE_MOE),
    "afmoe": in_turn(*_THREES_FROM_THE_END, _ASIAN, _WORDS_OF_V3),
    "falcon": {"type": "Sequence", "pretokenizers": _FALCON},
    "bloom": in_turn(rf" ?[^(\s|{_ENDS_OF_BLOOM})]+"),
    **dict.fromkeys(("mpt", "modern-bert", "roberta-bpe"), byte_level(use_regex=True)),
}
