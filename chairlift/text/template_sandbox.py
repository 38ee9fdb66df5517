"""Jinja as chat templates need it, with limits: a template can't escape, run on, or fill the memory.

A template is a stranger's program. What it does is paid for as work (about a node of its syntax tree a unit) and as
text (characters made), and it ends in OverLimit when either runs out, or before it does what would take too much at
once. Paying for loops, macros, output and comparisons is put into the syntax tree; for calls, operators, filters and
tests Jinja has hooks. The same template and messages come to the same counts on every machine.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Namespace

from chairlift.text.template_syntax import Generation, Metering


class Budget(NamedTuple):
    """What one rendering may use: units of work, some 100 to 400 ns each, and characters of all texts that it makes."""

    work: int
    text: int


class OverLimit(Exception):
    """A template does too much, or what can't be limited. The text completes "the chat template ..."."""


# Units of work for a call, and for one thing that is looked at or handed on.
_CALL, _LOOK = 8, 4
# A list counts as so many characters for each of its entries.
_ENTRY = 16
_MAX_BITS = 4096
_MAX_PADDING = 10_000
_MAX_PARTS = 100_000
_MAX_DIGITS = 4000
_MAX_INDENT = 16
_MAX_PRECISION = 100
# Texts up to this length are compared for nothing, longer ones for a unit of work for so many characters.
_SHORT = 1024
_CHARS_A_UNIT = 256
# Widths of five digits, or taken from the arguments.
_WIDE = re.compile(r"%[^a-zA-Z%]*\*|\d{5}")
_SMALL = frozenset({bool, float, type(None)})
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
}
_REFUSED_TEXT_METHODS = frozenset({"encode", "escape", "maketrans", "translate"})
# These search from the right, for which Python has no algorithm that is linear in all cases.
_FROM_THE_RIGHT = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
# They look no deeper into a container than to hand on what is in it.
_SHALLOW = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject"}
    | {"rejectattr", "reverse", "select", "selectattr", "slice"}
)
# No chat template has use for them, and what they cost is hard to tell.
_REFUSED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_COMPARING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le"),
    *("lessthan", "lower", "lt", "ne", "upper"),
)


class _Meter:
    """What is left of a rendering's budget."""

    __slots__ = ("text", "work")

    def __init__(self) -> None:
        self.work = self.text = 0

    def spend(self, work: int, text: int = 0) -> None:
        """Take from the budget. Raises OverLimit."""
        self.work -= work
        self.text -= text
        if self.work < 0:
            raise OverLimit("does too much work for one prompt")
        if self.text < 0:
            raise OverLimit("makes too much text for one prompt")

    def need(self, text: int) -> None:
        """Raise OverLimit if a text of so many characters could not be paid for."""
        if text > self.text:
            raise OverLimit("makes too much text for one prompt")

    def weigh(self, value: Any) -> int:
        """About how many characters a value's text has. Looking through all that is in it is paid for."""
        if isinstance(value, str):
            self.seen(value)
            return len(value)
        total, rest = 0, [value]
        while rest:
            each = rest.pop()
            self.spend(_LOOK)
            if isinstance(each, str):
                total += len(each) + 4
            elif isinstance(each, int):
                total += 8 + each.bit_length() // 3
            elif (inside := _inside(each)) is None:
                total += 32
            else:
                rest.extend(inside)
                total += 4
        return total

    def operand(self, value: Any) -> Any:
        """A value that is about to be compared, hashed, or handed to Python."""
        if type(value) is str:
            self.seen(value)
        elif type(value) not in _SMALL:
            self.weigh(value)
        return value

    def seen(self, value: Any) -> Any:
        """A value that is about to be compared, where it costs no more than the other side if it is no text."""
        if isinstance(value, str) and len(value) > _SHORT:
            self.spend(len(value) // _CHARS_A_UNIT)
        return value

    def made(self, value: Any) -> Any:
        """A value that was just made."""
        if isinstance(value, str):
            self.spend(1, len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(1, _ENTRY * len(value))
        elif isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise OverLimit(f"makes a number of more than {_MAX_BITS} bits")
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def written(self, value: Any) -> Any:
        """A value that is about to be text."""
        if type(value) is not str:
            self.spend(1, self.weigh(value))
            return value
        self.work -= 1
        self.text -= len(value)
        if self.work < 0 or self.text < 0:
            self.spend(0)
        return value

    def passed(self, value: Any, work: int) -> Any:
        """The outcome of a loop's condition."""
        self.spend(work)
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(_LOOK)
            yield value


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, since templates are written and tested for that. One rendering at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, to_json: Callable[..., str], functions: Mapping[str, Callable[..., Any]]) -> None:
        """Make one with `to_json` as the filter of that name, and global functions beside Jinja's own."""
        # The optimizer would compute 'a' * 10**10 while it compiles.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, loopcontrols])
        meter = self.meter = _Meter()
        self.filters["tojson"] = to_json
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._metered_filter(name, each) for name, each in self.filters.items()}
        for name in ("operand", "seen", "made", "written", "passed", "spend"):
            self.filters[f"#{name}"] = getattr(meter, name)
        for name in _COMPARING_TESTS:
            self.tests[name] = self._metered_test(self.tests[name])
        written = meter.written
        # One that takes the context has nothing computed by the compiler.
        self.finalize = jinja2.pass_context(lambda context, value: written(value))
        del self.globals["lipsum"]
        self.globals.update(functions)
        self._loaded: dict[CodeType, jinja2.Template] = {}

    def code_of(self, source: str) -> CodeType:
        """Compile for all sandboxes. Raises TemplateSyntaxError, and in many ways for what is nested too deeply."""
        code: CodeType = self.compile(source)
        return code

    def render(self, code: CodeType, budget: Budget, variables: Mapping[str, Any]) -> str:
        """Render what `code_of` compiled. Raises OverLimit, and whatever an expression can."""
        template = self._loaded.get(code)
        if template is None:
            template = self._loaded[code] = self.template_class.from_code(self, code, self.make_globals(None))
        self.meter.work, self.meter.text = budget
        return template.render(variables)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Metering().visit(super()._parse(source, name, filename))
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        """A subscription, whose key is hashed."""
        if type(argument) is tuple:
            self.meter.weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What an operator makes, if it is not too large."""
        meter = self.meter
        if operator == "+" and type(left) is str and type(right) is str:
            written: str = left + meter.written(right)
            meter.spend(1, len(left))
            return written
        meter.spend(1)
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            meter.need((len(left) + len(right)) * _size_of_one(left))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | list | tuple):
                    meter.need(len(value) * times * _size_of_one(value))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
                raise OverLimit(f"makes a number of more than {_MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call makes, if it is of what templates call."""
        meter = __self.meter
        meter.spend(_CALL)
        if not isinstance(__obj, FunctionType | Macro | LoopContext | BlockReference):
            if isinstance(__obj, BuiltinMethodType | MethodType):
                args = __self._checked(__obj.__self__, __obj.__name__, args, kwargs)
            for value in chain(args, kwargs.values()):
                meter.operand(value)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def _checked(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a method. Raises OverLimit for methods that templates have no use for."""
        if not isinstance(owner, str):
            if name not in _METHODS.get(type(owner), ()):
                raise OverLimit(f"calls {name!r}, which is not supported")
            return args
        if name in _REFUSED_TEXT_METHODS:
            raise OverLimit(f"calls {name!r}, which is not supported")
        meter, size = self.meter, len(owner)
        meter.seen(owner)
        if name == "join" and args:
            parts = list(args[0])
            meter.need(meter.weigh(parts) + size * len(parts))
            return (parts, *args[1:])
        if name == "replace" and len(args) > 1:
            meter.need(_replaced(owner, args[0], args[1]))
        elif name in _PADDING:
            width = sum(each for each in chain(args, kwargs.values()) if isinstance(each, int))
            meter.need(size + width * (owner.count("\t") if name == "expandtabs" else 1))
        elif name in _FROM_THE_RIGHT and args and isinstance(args[0], str):
            meter.spend(size * len(args[0]) // _CHARS_A_UNIT)
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A text's `format` or `format_map`; None for anything else."""
        if super().wrap_str_format(value) is None:
            return None
        text, of_map = str(value.__self__), value.__name__ == "format_map"
        formatter = _Formatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            self.meter.seen(text)
            return formatter.vformat(text, (), args[0]) if of_map else formatter.vformat(text, args, kwargs)

        return formatted

    def _check_format(self, text: str, given: Any) -> None:
        if _WIDE.search(text):
            raise OverLimit("pads a text to a width that is far too large, or given as a value")
        self.meter.need(len(text) + text.count("%") * (self.meter.weigh(given) + _MAX_PADDING))

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        meter, check = self.meter, _FILTER_CHECKS.get(name)
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter.spend(_CALL)
            if name not in _SHALLOW:
                if isinstance(args[skip], Iterator):
                    args = (*args[:skip], list(args[skip]), *args[skip + 1 :])
                for value in chain(args[skip:], kwargs.values()):
                    meter.operand(value)
            if check is not None:
                check(self, args[skip], args[skip + 1 :], kwargs)
            return meter.made(function(*args, **kwargs))

        return metered

    def _metered_test(self, function: Any) -> Callable[..., Any]:
        operand, spend = self.meter.operand, self.meter.spend

        @wraps(function)
        def metered(*args: Any) -> Any:
            spend(_CALL)
            return function(*map(operand, args))

        return metered


FilterCheck = Callable[[TemplateSandbox, Any, Sequence[Any], Mapping[str, Any]], None]


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    return [each for each in chain(args, kwargs.values()) if isinstance(each, int)]


def _at_most(limit: int) -> FilterCheck:
    def check(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for number in _numbers(args, kwargs):
            if abs(number) > limit:
                raise OverLimit(f"gives a filter a number above {limit}")

    return check


def _check_indent(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    widths = [len(each) if isinstance(each, str) else each for each in chain(args, kwargs.values()) if each is not None]
    sandbox.meter.need(len(str(value)) + (str(value).count("\n") + 1) * max(map(int, widths), default=4))


def _check_replace(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    texts = [*args, *(kwargs[name] for name in ("old", "new") if name in kwargs)]
    if len(texts) > 1:
        sandbox.meter.need(_replaced(str(value), texts[0], texts[1]))


def _check_join(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    between = max((len(each) for each in chain(args, kwargs.values()) if isinstance(each, str)), default=0)
    sandbox.meter.need(sandbox.meter.weigh(value) + between * len(value))


def _check_format(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    sandbox._check_format(str(value), [*args, *kwargs.values()])


def _check_json(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    indents = _numbers(args, kwargs)
    if any(each > _MAX_INDENT for each in indents) or sandbox.meter.weigh([*args, *kwargs.values()]) > 256:
        raise OverLimit("gives tojson an indent or separators that are far too large")
    # A character may be written as \uXXXX, and an entry begins with its indent.
    sandbox.meter.need(sandbox.meter.weigh(value) * (6 + 4 * max(indents, default=0)))


def _check_sum(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(_inside(each) is not None for each in chain(args, kwargs.values())):
        raise OverLimit("adds up lists by sum, which takes numbers only")


def _check_int(sandbox: TemplateSandbox, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise OverLimit(f"reads a number of more than {_MAX_DIGITS} digits")


_FILTER_CHECKS: dict[str, FilterCheck] = {
    "batch": _at_most(_MAX_PARTS),
    "center": _at_most(_MAX_PADDING),
    "float": _check_int,
    "format": _check_format,
    "indent": _check_indent,
    "int": _check_int,
    "join": _check_join,
    "replace": _check_replace,
    "round": _at_most(_MAX_PRECISION),
    "slice": _at_most(_MAX_PARTS),
    "sum": _check_sum,
    "tojson": _check_json,
}


def _inside(value: Any) -> Iterable[Any] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, dict):
        return chain(value.keys(), value.values())
    if isinstance(value, list | tuple) or type(value) in _VIEWS:
        found: Iterable[Any] = value
        return found
    if isinstance(value, Namespace):
        return tuple(object.__getattribute__(value, "_Namespace__attrs").values())
    return None


def _size_of_one(value: Sequence[Any]) -> int:
    return 1 if isinstance(value, str) else _ENTRY


def _replaced(text: str, old: Any, new: Any) -> int:
    """The length of a text after a replacement, at most."""
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


class _Formatter(SandboxedFormatter):
    """Python's format language without large widths."""

    _env: TemplateSandbox

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE.search(format_spec):
            raise OverLimit("pads a text to a width that is far too large")
        self._env.meter.written(value)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._env.meter.operand(value)
        return super().convert_field(value, conversion)
