"""The grammar of replies in a dialect: reasoning, then calls, or an answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from chairlift.text.argument_grammar import arguments_of
from chairlift.text.dialect import CallForm, Dialect, Notation, TagForm
from chairlift.text.lark import LarkRules, pattern_of

# White space that models write before calls and constrained answers.
_SPACE = "/[ \\n]{1,4}/?"
_NOT_BOTH = "tools and a form of the answer can't go together with this model: leave one out, or require a call"
# A form that begins with less than this may begin much that is no call.
_TELLING = 3


# Whether the prompt has opened the reasoning, or closed it.
ReasoningStart = Literal["open", "maybe", "closed"]


class ReplyShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply may be. `tools` are the schemas of arguments by name; what can't be kept to is left out of them, but
    for those that are `strict`. `answer` is the grammar of an answer that is constrained. `reasoning` says whether the
    prompt has opened it, or has closed it; `thinking_tokens` bounds it. With `continues` the prompt has begun the
    answer's text."""

    tools: Mapping[str, dict[str, Any]] = {}
    strict: frozenset[str] = frozenset()
    must_call: bool = False
    parallel: bool = True
    answer: str | None = None
    reasoning: ReasoningStart = "maybe"
    thinking_tokens: int | None = None
    continues: bool = False


def reply_grammar(dialect: Dialect, tokens: Mapping[str, int], reply: ReplyShape) -> str | None:
    """The grammar of all that is generated, None if it is free. `tokens` are those that have names.

    Raises ValueError for what this dialect can't keep to.
    """
    thinks = dialect.reasoning_content is not None and reply.reasoning != "closed"
    if not reply.tools and not (thinks and reply.thinking_tokens is not None):
        if reply.answer is None:
            return None
        marked = dialect.content is not None or dialect.wrapper is not None
        if not thinks and (not marked or reply.continues):
            return reply.answer
    rules = LarkRules(tokens)
    start = _Grammar(dialect, rules, reply).start()
    lark = rules.lark(start)
    return lark if reply.answer is None or "@answer" not in lark else _with_answer(lark, reply.answer)


class _Grammar:
    """Makes the rules of one grammar."""

    def __init__(self, dialect: Dialect, rules: LarkRules, reply: ReplyShape) -> None:
        self._dialect = dialect
        self._rules = rules
        self._reply = reply
        self._forms = tuple(form for form in dialect.tool_calls if not form.only_read) if reply.tools else ()
        self._tools: dict[CallForm, str] = {}
        self._arguments: dict[tuple[Notation, TagForm | None, str], list[tuple[str, str]]] = {}

    def start(self) -> str:
        """The reasoning, if there may be any, and the rest."""
        rules, reply, region = self._rules, self._reply, self._dialect.reasoning_content
        rest = self._calls_only() if reply.must_call else self._rest()
        if region is None or reply.reasoning == "closed":
            return rest
        if reply.thinking_tokens == 0 and reply.reasoning == "maybe":
            return rest
        thought = rules.up_to(region.close[0], reply.thinking_tokens)
        if reply.answer is not None and self._dialect.content is None:
            # Readers drop it there, and only there: elsewhere it would be of the answer.
            thought = f"{thought} {_SPACE}"
        if reply.reasoning == "open":
            return f"{thought} {rest}"
        return f"({self._opening(region.open)} {thought})? {rest}"

    def _opening(self, opens: Sequence[str]) -> str:
        """How reasoning begins, perhaps after white space: what is no token is one text for the lexer with that."""
        rules = self._rules
        some = [
            f"/[ \\n]{{0,4}}{pattern_of(each)}/"
            if rules.token(rules.head(each)) is None
            else f"{_SPACE} {rules.write(each)}"
            for each in opens
            if each
        ]
        return f"({' | '.join(some)})" + ("" if all(opens) else "?") if some else ""

    def _rest(self) -> str:
        """An answer, or calls, perhaps after some text."""
        rules = self._rules
        region = self._dialect.content
        if region is not None and self._reply.continues:
            return self._answer()
        if region is not None:
            space = _SPACE if self._reply.answer is not None else ""
            answer = f"{rules.write(region.open[0])} {space} {self._answer()}"
            before = [rules.write(each) + " " + rules.up_to(region.close[0]) for each in region.open[1:]]
            either = [answer, *(self._calls(form) for form in self._forms)]
            return f"({' | '.join(before)})? ({' | '.join(either)})"
        either = [self._wrapped(self._answer())]
        if self._reply.answer is not None:
            # Both at the start, and of one letter: which of them it is would be open.
            forms = [form for form in self._forms if form.anywhere]
            if self._forms and not any(rules.token(rules.head(form.begin + form.open)) for form in forms):
                raise ValueError(_NOT_BOTH)
            either += [f"{_SPACE} {self._calls(form)}" for form in forms]
        else:
            either += [self._after_text(form) if form.anywhere else self._at_start(form) for form in self._forms]
        return rules.add("rest", " | ".join(either))

    def _answer(self) -> str:
        if self._reply.answer is not None:
            return "@answer"
        return self._said()

    def _wrapped(self, answer: str) -> str:
        """An answer, or text before calls, perhaps between markers. Those that are no tokens are text like any."""
        region = self._dialect.wrapper
        if region is None:
            return answer
        opens = "" if self._reply.continues else self._perhaps(region.open)
        return f"{opens} {answer} {self._perhaps(region.close)}".strip()

    def _perhaps(self, markers: Sequence[str]) -> str:
        tokens = [self._rules.write(each) for each in markers if self._rules.token(each) is not None]
        return f"({' | '.join(tokens)})?" if tokens else ""

    def _said(self) -> str:
        """Free text, perhaps none, with the tokens of calls that are only read: they are no text, and without them such
        a call could not end."""
        free = self._free()
        strays = self._strays()
        return f"{free}? (({' | '.join(strays)}) {free}?)*" if strays else f"{free}?"

    def _strays(self) -> list[str]:
        rules = self._rules
        forms = [form for form in self._dialect.tool_calls if form.only_read] if self._forms else []
        begin = {rules.write(rules.head(form.begin + form.open)) for form in self._forms}
        found = {piece for form in forms for each in form.markers for piece in rules.pieces(each)}
        return sorted(piece for piece in found - begin if piece.startswith("<["))

    def _free(self) -> str:
        """Text in which no call begins; between markers there is none."""
        if self._dialect.content is not None:
            return self._rules.text()
        return self._rules.text(self._triggers(), self._unlike())

    def _unlike(self) -> list[str]:
        """Patterns of how text does not begin, since something else does: reasoning, or calls at the start."""
        region = self._dialect.reasoning_content
        opens = () if region is None else region.open
        unlike = [f"\\s*{pattern_of(each)}" for each in opens if self._rules.token(self._rules.head(each)) is None]
        return unlike + [self._beginning(form) for form in self._forms if not form.anywhere]

    def _triggers(self) -> list[str]:
        """What no free text has: it begins a call."""
        heads = [self._rules.head(form.begin + form.open) for form in self._forms if form.anywhere]
        return [head.split()[0] for head in heads]

    def _beginning(self, form: CallForm) -> str:
        """A pattern of how calls begin that stand at the start."""
        open_ = form.begin + form.open
        telling = (
            pattern_of(open_) if len(open_) >= _TELLING else f"{pattern_of(open_)}[\\w.-]+{pattern_of(form.named)}"
        )
        return f"\\s*{telling}"

    def _calls_only(self) -> str:
        return self._rules.add("calls", " | ".join(f"{_SPACE} {self._calls(form)}" for form in self._forms))

    def _calls(self, form: CallForm) -> str:
        """One call or more."""
        return f"{self._rules.write(form.begin, form.open)} {self._after_head(form)}"

    def _after_text(self, form: CallForm) -> str:
        """The same after any text."""
        rules = self._rules
        whole = form.begin + form.open
        head = rules.head(whole)
        if rules.token(head) is not None:
            return f"{self._wrapped(self._said())} {rules.write(whole)} {self._after_head(form)}"
        trigger = head.split()[0]
        # The longest text that ends so is taken, and the lexer does not go back.
        text = rules.lazy(trigger, unlike=self._unlike())
        return f"{text} {rules.write(whole[len(trigger) :])} {self._after_head(form)}"

    def _at_start(self, form: CallForm) -> str:
        """The same where free text might stand. What tells them apart must be one text for the lexer."""
        rules = self._rules
        heads = [
            f"/[ \\n]{{0,4}}{pattern_of(form.begin + form.open + name + form.named)}/ {arguments}"
            for name, arguments in self._arguments_in(form)
        ]
        return f"({' | '.join(heads)}) {rules.any_of(form.close)} {self._more(form)}"

    def _after_head(self, form: CallForm) -> str:
        """From the first call's name to the end of all calls."""
        return f"{self._one(form)} {self._more(form)}"

    def _more(self, form: CallForm) -> str:
        """What follows the first call: others, and the end of all."""
        rules, more = self._rules, ""
        if self._reply.parallel and form.separator is not None:
            more = f"({rules.write(form.separator, form.open)} {self._one(form)})*"
        return f"{more} {rules.write(form.end)}"

    def _one(self, form: CallForm) -> str:
        """One call, from its name on."""
        if form not in self._tools:
            rules = self._rules
            tools = [f"{rules.write(name, form.named)} {made}" for name, made in self._arguments_in(form)]
            self._tools[form] = rules.add("call", f"({' | '.join(tools)}) {rules.any_of(form.close)}")
        return self._tools[form]

    def _arguments_in(self, form: CallForm) -> list[tuple[str, str]]:
        """The name of each tool, and its arguments, which are the same in forms of one notation."""
        written = form.notation, form.tags, form.quote
        if written not in self._arguments:
            rules, strict = self._rules, self._reply.strict
            made = self._arguments[written] = []
            for name, schema in self._reply.tools.items():
                # What is strict may turn out to be wrong only when it is compiled.
                if strict:
                    rules.part(f"tool {name}")
                made.append((name, rules.add("arguments", arguments_of(rules, form, name, schema, name in strict))))
            if strict:
                rules.part("all tools" if len(made) > 1 else f"tool {made[0][0]}")
        return self._arguments[written]


def _with_answer(lark: str, answer: str) -> str:
    """A grammar that refers to the answer's, and that."""
    grammars = [{"name": "reply", "lark_grammar": lark}]
    if answer.lstrip().startswith("{"):
        first, *others = json.loads(answer)["grammars"]
        return json.dumps({"grammars": [*grammars, {**first, "name": "answer"}, *others]})
    return json.dumps({"grammars": [*grammars, {"name": "answer", "lark_grammar": answer}]})
