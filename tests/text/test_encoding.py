"""Texts and pairs as encoders take them, against transformers' own handling of the same tokenizer.json."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from support.text_tokenizers import KINDS, build
from tokenizers import processors

from chairlift.errors import ConfigError, InputTooLong, InvalidRequest, UnsupportedModel
from chairlift.folders.sentence_files import ChatFormat, SentenceFiles
from chairlift.text import encoding
from chairlift.text.encoding import Cut, TextEncoder
from chairlift.text.tokenizer import Tokenizer, encode_all

TEXTS = ["hello world", "the quick brown fox sees and sees hello world hello", "Hello", ""]
PAIRS = [("hello world", "the quick brown fox"), ("the quick brown fox sees words", "hello"), ("", "hello world")]


@pytest.fixture(params=["wordpiece", "bytelevel"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer that puts special tokens around texts and pairs, and saved settings that must not count."""
    tokenizer = build(request.param)
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1", special_tokens=special
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def expected(folder: Path, max_tokens: int, given: list[Any], **settings: Any) -> list[tuple[list[int], list[int]]]:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    found = [
        reference(
            *((one,) if isinstance(one, str) else one),
            truncation=True,
            max_length=max_tokens,
            return_token_type_ids=True,
        )
        for one in given
    ]
    return [(one["input_ids"], one["token_type_ids"]) for one in found]


@pytest.mark.parametrize("max_tokens", [100, 12, 9, 8, 7, 5])
def test_texts_and_pairs(folder: Path, max_tokens: int) -> None:
    encoder = TextEncoder(folder, max_tokens)
    for found, given in (
        (encoder.encode_texts(TEXTS, truncate=True), TEXTS),
        (encoder.encode_pairs(PAIRS, truncate=True), PAIRS),
    ):
        for one, (ids, types) in zip(found, expected(folder, max_tokens, given), strict=True):
            assert one.token_ids == ids
            assert (one.type_ids or [0] * len(ids)) == types
            assert len(ids) <= max_tokens


def test_types_are_left_out_where_all_are_of_one_kind(folder: Path) -> None:
    encoder = TextEncoder(folder, 100)
    assert encoder.encode_texts(["hello"])[0].type_ids is None
    assert encoder.encode_pairs([("hello", "world")])[0].type_ids is not None


def test_too_long_is_refused_unless_it_may_be_cut(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="the model takes 5"):
        TextEncoder(folder, 5).encode_texts(TEXTS)


def test_many_are_encoded_some_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder(str(folder), 64)
    whole = [encoder.encode_texts(TEXTS), encoder.encode_pairs(PAIRS)]
    sizes: list[int] = []

    def counted(backend: Any, texts: Any, *more: Any) -> Any:
        sizes.append(len(texts))
        return encode_all(backend, texts, *more)

    monkeypatch.setattr(encoding, "encode_all", counted)
    monkeypatch.setattr(encoding, "_SLICE_CHARS", 20)
    assert [encoder.encode_texts(TEXTS), encoder.encode_pairs(PAIRS)] == whole
    assert len(sizes) > 2
    assert sum(sizes) == len(TEXTS) + len(PAIRS)


def test_what_has_to_be_tokenized_of_a_text_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_SLICE_CHARS", 400)
    encoder, longest = TextEncoder(folder, 20), [0]

    def watched(text: str) -> int:
        longest.append(len(text))
        return plain_count(text)

    def encoded(backend: Any, texts: Any, *more: Any) -> Any:
        longest.append(sum(len(part) for text in texts for part in ((text,) if isinstance(text, str) else text)))
        return encode_all(backend, texts, *more)

    plain_count = encoder._lengths.count
    monkeypatch.setattr(encoder._lengths, "count", watched)
    monkeypatch.setattr(encoding, "encode_all", encoded)
    # Where it could be cut is too far away; a normalizer makes 18 letters of this one.
    for text in ("." * 401, "." * 450 + " a b " + "." * 450, "\ufdfa" * 23):
        for cut in (True, Cut(side="left")):
            with pytest.raises(InputTooLong, match="characters that would have to be tokenized, more than 4") as found:
                encoder.encode_texts(["hello", text], truncate=cut)
            assert found.value.index == 1
            with pytest.raises(InputTooLong):
                encoder.encode_pairs([("hello", text)], truncate=cut)
        for refused in (encoder.encode_texts, encoder.tokens):
            with pytest.raises(InputTooLong):
                refused([text])
    with pytest.raises(InputTooLong):
        encoder.encode_pairs([("." * 201, "." * 201)], truncate=True)
    assert max(longest) <= 400
    # What is cut where words end needs no more than its head.
    words = "hello world " * 1000
    assert encoder.encode_texts([words], truncate=True) == encoder.encode_texts([words[:396]], truncate=True)
    assert len(encoder.encode_pairs([("fox", words)], truncate=True)[0].token_ids) == 20
    with pytest.raises(InvalidRequest, match="Unicode"):
        encoder.encode_texts([words + "\ud800"], truncate=True)
    # A model that takes more tokens takes longer texts.
    assert len(TextEncoder(folder, 100).encode_texts(["." * 1000], truncate=True)[0].token_ids) == 100
    assert len(encoder.tokens(["fox " * 90] * 3)) == 3
    assert max(longest) <= 1000


def test_what_is_made_of_a_text_is_counted_letter_by_letter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To normalize a text whole takes time by the square of the accents that are in a row."""
    text = "\u0301" * 300 + "\u0323" * 300 + "\ufdfa한Å" * 3 + "plain \ud800"
    whole = len(unicodedata.normalize("NFKD", text))
    looked: list[str] = []

    def watched(form: str, given: str) -> str:
        looked.append(given)
        return plain(form, given)

    plain = unicodedata.normalize
    monkeypatch.setattr(encoding.unicodedata, "normalize", watched)
    monkeypatch.setattr(encoding, "_PIECE", 64)
    assert encoding._size(text) == whole
    assert TextEncoder(folder, 5000).encode_texts([text[:-1]])
    assert max(map(len, looked)) == 1


def test_tokens_are_told_as_they_are_in_the_text(folder: Path) -> None:
    """Also where its small letters are more than it has."""
    encoder = TextEncoder(folder, 100, SentenceFiles(lowercase=True))
    text = "HELLO \u0130 World"
    (tokens,) = encoder.tokens([text])
    assert all(token.text == text[token.start : token.stop] for token in tokens if token.start is not None)
    assert tokens[-2].stop == len(text)
    assert "HELLO" in "".join(token.text for token in tokens)


def test_lowercase(folder: Path) -> None:
    encoder, plain = TextEncoder(folder, 100, SentenceFiles(lowercase=True)), TextEncoder(folder, 100)
    assert encoder.encode_texts(["HELLO World"]) == plain.encode_texts(["hello world"])
    assert encoder.encode_pairs([("HELLO", "World")]) == plain.encode_pairs([("hello", "world")])


def test_a_lone_surrogate_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        TextEncoder(folder, 100).encode_texts(["a\ud800"])


_BEGIN, _END = (build("bytelevel").token_to_id(token) for token in ("<s>", "<|end|>"))
_BEGINNING = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", _BEGIN)])
_LETTERS = processors.ByteLevel(trim_offsets=True)


def ended_folder(target: Path, before: Any, **config: Any) -> Path:
    """A tokenizer whose config, and not its post-processor, says that a token ends texts."""
    tokenizer = build("bytelevel")
    tokenizer.post_processor = before
    tokenizer.save(str(target / "tokenizer.json"))
    told = {"add_eos_token": True, "bos_token": "<s>", "eos_token": {"content": "<|end|>"}, **config}
    (target / "tokenizer_config.json").write_text(json.dumps(told))
    return target


@pytest.mark.parametrize("max_tokens", [100, 9, 7])
@pytest.mark.parametrize(
    "before", [_BEGINNING, None, _LETTERS, processors.Sequence([_LETTERS, _BEGINNING])], ids=lambda each: type(each)
)
def test_texts_end_as_the_config_says(before: Any, max_tokens: int, tmp_path: Path) -> None:
    """As with e5-mistral and its kin, which pool that token; transformers is told by its arguments."""
    folder = ended_folder(tmp_path, before, tokenizer_class="LlamaTokenizer")
    begins = "Template" in repr(before)
    told = {"bos_token": "<s>", "eos_token": "<|end|>", "add_bos_token": begins, "add_eos_token": True}
    encoder = TextEncoder(folder, max_tokens)
    # What looks like that token is text.
    assert encoder.encode_texts(["hello<|end|>"], truncate=True)[0].token_ids.count(_END) == 1
    for found, given in (
        (encoder.encode_texts(TEXTS, truncate=True), TEXTS),
        (encoder.encode_pairs(PAIRS, truncate=True), PAIRS),
    ):
        for one, (ids, types) in zip(found, expected(folder, max_tokens, given, **told), strict=True):
            assert one.token_ids == ids
            assert (one.type_ids or [0] * len(ids)) == types
            assert ids[-1] == _END
    # Whoever generates goes on after a text.
    assert _END not in Tokenizer.from_folder(folder).encode("hello")


def test_no_other_texts_end_so(tmp_path: Path) -> None:
    plain = build("bytelevel").encode("hello").ids
    for config in ({"tokenizer_class": "BertTokenizer"}, {"add_eos_token": False}):
        folder = ended_folder(tmp_path, None, **config)
        assert TextEncoder(folder, 9).encode_texts(["hello"])[0].token_ids == plain
    ends = processors.TemplateProcessing("$A <|end|>", "$A $B", [("<|end|>", _END)])
    assert TextEncoder(ended_folder(tmp_path, ends), 9).encode_texts(["hello"])[0].token_ids == [*plain, _END]
    with pytest.raises(UnsupportedModel, match="no eos_token that is a token"):
        TextEncoder(ended_folder(tmp_path, None, eos_token="</s>"), 9)
    with pytest.raises(UnsupportedModel, match="with this post_processor"):
        TextEncoder(ended_folder(tmp_path, processors.BertProcessing(("<s>", _BEGIN), ("<s>", _BEGIN))), 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parse_special", [True, False])
def test_tokens_starts_take_a_text_apart(kind: str, parse_special: bool) -> None:
    tokenizer, text = Tokenizer(build(kind)), "Hello  world,<|end|> 漢字 é"
    starts = tokenizer.starts(text, parse_special)
    assert len(starts) == len(tokenizer.encode(text, parse_special=parse_special))
    parts = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(parts) == text
    assert any(part.strip() == "world" or part == "l" for part in parts)
    assert ("<|end|>" in [part.strip() for part in parts]) is parse_special


QUERY_FIRST = (
    "<s>{% for m in messages if m.role == 'system' %}{{ m.content }}: {% endfor %}"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} ? "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|end|>yes or no"
    "{% if add_generation_prompt %}:<s>{% endif %}"
)
DOCUMENT_FIRST = (
    "{% set texts = messages | sort(attribute='role') %}{% for m in texts %}"
    "<s>{{ m.role }} {{ m.content[0].text | trim }}\n{% endfor %}<|end|>"
)


def chatting(
    target: Path,
    kind: str,
    template: str,
    max_tokens: int = 100,
    prompt: str | None = None,
    judges: bool = True,
    **chat: Any,
) -> Any:
    """An encoder whose texts or pairs are chats, and transformers' tokenizer with the same template."""
    transformers = pytest.importorskip("transformers")
    build(kind).save(str(target / "tokenizer.json"))
    (target / "chat_template.jinja").write_text(template)
    files = SentenceFiles(
        prompts={"none": ""} if prompt is None else {"it": prompt, "none": ""},
        default_prompt=None if prompt is None else "it",
        chat=ChatFormat(**{"parts": False, "arguments": {}} | chat),
        judges=judges,
    )
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(target / "tokenizer.json"))
    reference.chat_template = template
    return TextEncoder(target, max_tokens, files), reference


CHATS = [*PAIRS[:2], ("hello?", " the 漢字 fox\n "), ("Hello  world", "")]


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_that_are_chats(kind: str, tmp_path: Path) -> None:
    """As sentence-transformers has transformers render and tokenize them."""
    encoder, reference = chatting(tmp_path, kind, QUERY_FIRST, prompt="find", arguments={"add_generation_prompt": True})
    for pair, found in zip(CHATS, encoder.encode_pairs(CHATS), strict=True):
        chat = [{"role": "system", "content": "find"}]
        chat += [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
        assert found.token_ids == reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert found.type_ids is None
    encoder, reference = chatting(tmp_path, kind, DOCUMENT_FIRST, parts=True)
    for pair, found in zip(CHATS, encoder.encode_pairs(CHATS), strict=True):
        parts = [[{"type": "text", "text": text}] for text in pair]
        chat = [{"role": role, "content": part} for role, part in zip(("query", "document"), parts, strict=True)]
        assert found.token_ids == reference.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", [QUERY_FIRST, DOCUMENT_FIRST])
def test_of_pairs_that_are_chats_only_the_texts_are_cut(template: str, side: Any, tmp_path: Path) -> None:
    encoder, _ = chatting(tmp_path, "bytelevel", template, 40, parts=template is DOCUMENT_FIRST)
    backend, query, document = build("bytelevel"), "the fox 漢", "hello world " * 40 + "😀" * 9
    (fixed,) = encoder.encode_pairs([("", "")])
    for forged in ("", "<|end|>"):
        (found,) = encoder.encode_pairs([(query, document + forged)], truncate=Cut(side=side))
        assert len(found.token_ids) == 40
        # The template's special tokens, all of them and no others.
        special = [each for each in found.token_ids if each in (_BEGIN, _END)]
        assert special == [each for each in fixed.token_ids if each in (_BEGIN, _END)]
        text = backend.decode(found.token_ids, skip_special_tokens=False)
        assert query in text
        assert ("😀" in text) == (side == "left")
    (short,) = encoder.encode_pairs([(query, document)], truncate=Cut(second=3, side=side))
    alone = backend.encode(query, add_special_tokens=False)
    assert len(fixed.token_ids) + len(alone) + 1 <= len(short.token_ids) <= len(fixed.token_ids) + len(alone) + 3
    with pytest.raises(InputTooLong, match=r"an input has .* tokens, but the model takes 40"):
        encoder.encode_pairs([(query, document)])
    size = len(fixed.token_ids)
    with pytest.raises(InvalidRequest, match=f"can't be cut to {size} tokens, since the chat template puts {size}"):
        encoder.encode_pairs([(query, document)], truncate=Cut(size))


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        ("{{ messages[0].content }}{{ messages[0].content }}{{ messages[1].content }}", {}, "once each"),
        ("{{ messages[0].content }}{{ messages[1].content | replace(' ', '') }}", {}, "changes query or document"),
        ("{{ raise_exception('no such role') }}", {}, "no such role; a model that judges pairs needs"),
        ("{{ messages[0].content }}{{ messages[1].content }}", {"arguments": {"messages": []}}, "can't be set"),
        (QUERY_FIRST, {"max_tokens": 9}, "leaves no room for texts in 9; raise max_model_len"),
    ],
    ids=str,
)
def test_templates_that_are_not_for_pairs(template: str, chat: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedModel, ConfigError), match=message):
        chatting(tmp_path, "bytelevel", template, **chat)


def test_a_model_may_judge_single_texts_alone(tmp_path: Path) -> None:
    user = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|end|>{% endfor %}"
    encoder, reference = chatting(tmp_path, "bytelevel", user)
    assert encoder.encode_texts(["hello"])[0].token_ids == reference.encode("hello<|end|>", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match=r"no place for the roles query and document.*; send single texts"):
        encoder.encode_pairs([("hello", "world")])


USER = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>it:{% endif %}"
)
PARTS = "{% for m in messages %}<s>{{ m.role }}{% for p in m.content %} {{ p.text }}{% endfor %}<|end|>{% endfor %}"
SAID = [*TEXTS[:3], " the 漢字 fox\n ", "<"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_messages(kind: str, tmp_path: Path) -> None:
    """As sentence-transformers has transformers render and tokenize them, with a prompt as what the system says."""
    arguments = {"add_generation_prompt": True}
    encoder, reference = chatting(tmp_path, kind, USER, prompt="find", judges=False, arguments=arguments)
    for name, said in (("it", "find"), (None, "find"), ("none", "")):
        for text, found in zip(SAID, encoder.encode_texts(SAID, prompt_name=name), strict=True):
            chat = [{"role": "system", "content": said}] if said else []
            chat.append({"role": "user", "content": text})
            assert found.token_ids == reference.apply_chat_template(chat, **arguments, return_dict=False)
            assert found.type_ids is None
    encoder, reference = chatting(tmp_path, kind, PARTS, judges=False, parts=True)
    for text, found in zip(SAID, encoder.encode_texts(SAID), strict=True):
        chat = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        assert found.token_ids == reference.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_messages_only_the_text_is_cut(side: Any, tmp_path: Path) -> None:
    encoder, reference = chatting(tmp_path, "bytelevel", USER, 40, "find", judges=False)
    text = " \n" * 50 + "hello world " * 40
    chat = [{"role": "system", "content": "find"}, {"role": "user", "content": text}]
    whole = reference.apply_chat_template(chat, return_dict=False)
    (found,) = encoder.encode_texts([text], truncate=Cut(side=side))
    assert len(found.token_ids) == 40
    end = build("bytelevel").encode("<|end|>\n", add_special_tokens=False).ids
    if side == "right":
        assert found.token_ids == [*whole[: 40 - len(end)], *end]
    else:
        begin = build("bytelevel").encode("<s>system: find<|end|>\nuser:", add_special_tokens=False).ids
        assert found.token_ids == [*begin, *whole[len(begin) - 40 :]]
    with pytest.raises(InputTooLong, match=r"an input has .* tokens, but the model takes 40"):
        encoder.encode_texts([text])


def test_what_a_template_has_in_one_token_with_a_text_is_not_cut_off(tmp_path: Path) -> None:
    encoder, reference = chatting(tmp_path, "bytelevel", "{{ messages[0].content }}lo<|end|>", 20, judges=False)
    text = "fox " * 60 + "hel"
    assert len(reference.encode(" hello")) < len(reference.encode(" hel") + reference.encode("lo"))
    (found,) = encoder.encode_texts([text], truncate=Cut())
    assert len(found.token_ids) == 20
    assert reference.decode(found.token_ids).endswith(" hello<|end|>")


def test_messages_are_told_token_by_token(tmp_path: Path) -> None:
    encoder, _ = chatting(tmp_path, "bytelevel", USER, prompt="find", judges=False)
    for text in (" hello <|end|> fox ", "漢 fox"):
        (told,) = encoder.tokens([text], prompt_name="it")
        assert [each.id for each in told] == encoder.encode_texts([text])[0].token_ids
        said = [each for each in told if each.start is not None]
        told_of = {place for each in said for place in range(each.start, each.stop)}
        assert told_of == set(range(text.index(text.strip()), len(text.rstrip())))
        assert all(each.text == text[each.start : each.stop] for each in said)
        assert all(each.special for each in told if each.start is None)
        (bare,) = encoder.tokens([text.strip()], add_special_tokens=False)
        assert {place for each in bare for place in range(each.start, each.stop)} == set(range(len(text.strip())))


def test_of_a_template_for_pairs_alone_a_text_is_told_without_it(tmp_path: Path) -> None:
    encoder, reference = chatting(tmp_path, "bytelevel", QUERY_FIRST, prompt="find")
    (told,) = encoder.tokens(["hello world"])
    assert [each.id for each in told] == reference.encode("hello world", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="no place for the role user"):
        encoder.tokens(["hello"], prompt_name="it")
    encoder, _ = chatting(tmp_path, "bytelevel", USER, prompt="find", judges=False)
    with pytest.raises(InvalidRequest, match="set that, or leave prompt_name out"):
        encoder.tokens(["hello"], add_special_tokens=False, prompt_name="it")


def test_what_takes_long_to_render_or_tokenize_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"puts .* characters around a text"):
        chatting(tmp_path, "bytelevel", "{{ 'x' * 200000 }}{{ messages[0].content }}", judges=False)
    files = SentenceFiles(prompts={str(name): "" for name in range(101)}, chat=ChatFormat(False, {}))
    with pytest.raises(UnsupportedModel, match="101 prompts are too many for texts that are messages; up to 100"):
        TextEncoder(tmp_path, 100, files)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedModel, match="no chat template: texts that are messages need a chat_template"):
        TextEncoder(tmp_path, 100, SentenceFiles(chat=ChatFormat(False, {})))


def test_templates_that_are_not_for_texts(tmp_path: Path) -> None:
    """They are refused where a model embeds, and only when they are needed where it judges pairs."""
    for template, chat, message in (
        (QUERY_FIRST, {}, "no place for the role user: texts that are messages need a chat_template.jinja"),
        ("{{ messages[0].content | upper }}", {}, "changes user; only trimming is supported"),
        ("{{ messages[0].content }}" * 2, {}, "no place for the role user"),
        ("{{ messages[0].content | replace(' ', '') }}", {}, "changes user; only trimming is supported"),
        (USER, {"prompt": "find " * 50}, "leaves no room for texts in 100; raise max_model_len"),
        ("{{ raise_exception('no system') if messages[1] }}{{ messages[0].content }}", {"prompt": "a"}, "no system"),
    ):
        with pytest.raises((UnsupportedModel, ConfigError), match=message):
            chatting(tmp_path, "bytelevel", template, judges=False, **chat)
    encoder, _ = chatting(tmp_path, "bytelevel", QUERY_FIRST)
    assert encoder.encode_texts([]) == []
    with pytest.raises(InvalidRequest, match=r"no place for the role user.*; send pairs of texts"):
        encoder.encode_texts(["hello"])


def test_instructions(tmp_path: Path) -> None:
    """A request's own takes the place of the folder's; what looks like a special token in it is text."""
    encoder, reference = chatting(tmp_path, "bytelevel", QUERY_FIRST, prompt="find")
    plain = encoder.encode_pairs(CHATS)
    for said in ("find", "the quick 漢 fox", "see <|end|> words"):
        template = encoder.instructed(said)
        for pair, found, usual in zip(CHATS, encoder.encode_pairs(CHATS, template=template), plain, strict=True):
            chat = [{"role": "system", "content": said}]
            chat += [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
            ids = reference.apply_chat_template(chat, return_dict=False)
            assert (found.token_ids == ids) is ("<|end|>" not in said)
            assert (found == usual) is (said == "find")
            assert found.token_ids.count(_END) == 1
            text = reference.decode(found.token_ids)
            assert said in text
    (found,) = encoder.encode_pairs([("fox", "hello " * 200)], truncate=True, template=encoder.instructed("sees all"))
    assert (len(found.token_ids), "sees all: fox" in reference.decode(found.token_ids)) == (100, True)
    with pytest.raises(InvalidRequest, match=r"instruction, with the chat template, has .* tokens, but"):
        encoder.instructed("hello " * 200)
    with pytest.raises(InvalidRequest, match="instruction has more than 524288 characters"):
        encoder.instructed("x" * 2**20)
    encoder, _ = chatting(tmp_path, "bytelevel", "{{ messages[-2].content }}{{ messages[-1].content }}", prompt="find")
    with pytest.raises(InvalidRequest, match=r"no place for the roles system, query and .*leave instruction out"):
        encoder.instructed("sees")
    encoder, _ = chatting(tmp_path, "bytelevel", USER, judges=False)
    with pytest.raises(InvalidRequest, match="this model does not judge pairs; leave instruction out"):
        encoder.instructed("sees")


def test_a_prompt_comes_before_the_first_of_a_pair(folder: Path) -> None:
    """As in sentence-transformers, where pairs are no chats."""
    files = SentenceFiles(prompts={"it": "the fox: "}, default_prompt="it")
    prompted, plain = TextEncoder(folder, 100, files), TextEncoder(folder, 100)
    assert prompted.encode_pairs([("hello", "world")]) == plain.encode_pairs([("the fox: hello", "world")])
    assert prompted.encode_texts(["hello"]) == plain.encode_texts(["the fox: hello"])
    with pytest.raises(InvalidRequest, match="prompt_name 'other' is not one of this model's prompts: it"):
        prompted.check_prompt("other")
