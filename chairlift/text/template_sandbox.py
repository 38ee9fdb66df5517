"""Jinja as chat templates need it, with limits: a template can't escape, run on, or fill the memory.

A template is a stranger's program. What it does is paid for as work (about a node of its syntax tree a unit) and as
text (characters made), and it ends in OverLimit when either runs out, or before it does what would take too much at
once. Paying for loops, macros, output and comparisons is put into the syntax tree; for calls, operators, filters and
tests Jinja has hooks. The same template and messages come to the same counts on every machine.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import wraps
from itertools import chain
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Namespace

from chairlift.text.template_meter import CHARS_A_UNIT, ENTRY, MAX_BITS, VIEWS, Budget, Meter, OverLimit, inside_of
from chairlift.text.template_syntax import Generation, Metering

__all__ = ["Budget", "OverLimit", "TemplateSandbox"]

# Units of work for a call.
_CALL = 8
# A unit of work is so many characters of a text that is taken apart, into words, bytes or the parts of a path.
_CHARS_APART = 4
_MAX_PADDING = 10_000
_MAX_PARTS = 100_000
_MAX_DIGITS = 4000
_MAX_INDENT = 16
_MAX_PRECISION = 100
# Widths of five digits, or taken from the arguments.
_WIDE = re.compile(r"%[^a-zA-Z%]*\*|\d{5}")
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
_REFUSED_TEXT_METHODS = frozenset({"encode", "escape", "maketrans", "striptags", "translate"})
# These may cost as much as both texts' lengths multiplied: a search from the right, and for any of some characters.
_SLOW_SEARCHES = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_SPLITTING = frozenset({"rsplit", "split", "splitlines"})
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
# They look no deeper into a container than to hand on what is in it.
_SHALLOW = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject"}
    | {"rejectattr", "reverse", "select", "selectattr", "slice"}
)
# They make a list of a text's characters, ...
_TAKING_APART = frozenset({"groupby", "join", "list", "slice", "sort"})
# ... these run through a container, ...
_RUNNING = frozenset({"batch", "map", "reject", "rejectattr", "select", "selectattr", "slice"})
# ... and these may take a path to an attribute.
_WITH_PATHS = frozenset(
    {"groupby", "join", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "sort", "sum", "unique"}
)
# No chat template has use for them, and what they cost is hard to tell.
_REFUSED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_COMPARING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "even", "ge", "greaterthan", "gt", "le"),
    *("lessthan", "lower", "lt", "ne", "odd", "upper"),
)
# These make a text of what they are given, ...
_TESTS_OF_TEXT = frozenset({"lower", "upper"})
# ... and to these a text is a format.
_TESTS_OF_NUMBERS = frozenset({"divisibleby", "even", "odd"})


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, since templates are written and tested for that. One rendering at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, to_json: Callable[..., str], functions: Mapping[str, Callable[..., Any]]) -> None:
        """Make one with `to_json` as the filter of that name, and global functions beside Jinja's own."""
        # The optimizer would compute 'a' * 10**10 while it compiles.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, loopcontrols])
        meter = self.meter = Meter()
        self.filters["tojson"] = to_json
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._metered_filter(name, each) for name, each in self.filters.items()}
        for name in ("operand", "seen", "key", "found", "made", "written", "passed", "spend"):
            self.filters[f"#{name}"] = getattr(meter, name)
        for name in _COMPARING_TESTS:
            self.tests[name] = self._metered_test(name, self.tests[name])
        self.tests["in"] = meter.found
        written = meter.written
        # One that takes the context has nothing computed by the compiler.
        self.finalize = jinja2.pass_context(lambda context, value: written(value))
        del self.globals["lipsum"]
        self.globals.update({name: self._told(each) for name, each in functions.items()})
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
        """A subscription, whose key is hashed. The paths of filters come here part by part."""
        self.meter.spend(2)
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
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise OverLimit(f"makes a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "-" and (isinstance(left, VIEWS) or isinstance(right, VIEWS)):
            raise OverLimit("subtracts keys or items of a dict, which makes a set")
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """What a call makes, if it is of what templates call."""
        meter = __self.meter
        meter.spend(_CALL + len(args) + len(kwargs))
        if not isinstance(__obj, FunctionType | Macro | LoopContext | BlockReference):
            if isinstance(__obj, BuiltinMethodType | MethodType):
                args = __self._checked(__obj.__self__, __obj.__name__, args, kwargs)
            elif __obj is dict or __obj is Namespace:
                args = tuple(map(__self._checked_pairs, args))
            for value in chain(args, kwargs.values()):
                meter.operand(value)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def _checked(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a method. Raises OverLimit for methods that templates have no use for."""
        meter = self.meter
        if not isinstance(owner, str):
            if name not in _METHODS.get(type(owner), ()):
                raise OverLimit(f"calls {name!r}, which is not supported")
            if name in ("count", "index") and args:
                # The error about a value that is not there has its text.
                meter.need(meter.weigh(args[0]))
                meter.searched(owner, args[0])
            return args
        if name in _REFUSED_TEXT_METHODS:
            raise OverLimit(f"calls {name!r}, which is not supported")
        size = len(owner)
        meter.seen(owner)
        if name == "join" and args:
            if isinstance(args[0], str):
                meter.need(ENTRY * len(args[0]))
            parts = list(args[0])
            meter.need(meter.weigh(parts) + size * len(parts))
            return (parts, *args[1:])
        if name == "replace" and len(args) > 1:
            meter.need(_replaced(owner, args[0], args[1]))
        elif name in _PADDING:
            width = sum(_numbers(chain(args, kwargs.values())))
            meter.need(size + width * (owner.count("\t") if name == "expandtabs" else 1))
        elif name in _SLOW_SEARCHES or name in _SPLITTING:
            wanted = "".join(_texts(chain(args, kwargs.values())))
            if name in _SPLITTING:
                meter.need(size + ENTRY * (owner.count(wanted) if wanted else size // 2))
            if name in _SLOW_SEARCHES:
                meter.spend(size * len(wanted) // CHARS_A_UNIT)
        return args

    def _checked_pairs(self, pairs: Any) -> Any:
        """What a dict is made of, with keys that a dict may have."""
        if not isinstance(pairs, dict):
            pairs = list(pairs)
            for pair in pairs:
                self.meter.key(next(iter(pair), None))
        return pairs

    def _told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that may make a text of what it is given."""

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            for value in chain(args, kwargs.values()):
                self.meter.written(value)
            return function(*args, **kwargs)

        return metered

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
        is_deep, takes_apart, runs = name not in _SHALLOW, name in _TAKING_APART, name in _RUNNING
        takes_path, trims = name in _WITH_PATHS, name == "trim"

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            value, more, size = args[skip], args[skip + 1 :], 0
            meter.spend(_CALL + len(args))
            if takes_apart and isinstance(value, str):
                meter.need(ENTRY * len(value))
            if runs and isinstance(value, Sized):
                meter.spend(_CALL * len(value))
            if takes_path:
                meter.spend(sum(map(len, _texts(chain(more, kwargs.values())))) // _CHARS_APART)
            if is_deep:
                if isinstance(value, Iterator):
                    value = list(value)
                # They may make a text, or keys to sort by, of all that is in it before there is anything to pay for.
                size = meter.weigh(value)
                meter.need(size)
                for each in chain(more, kwargs.values()):
                    meter.operand(each)
                    # Each of the value's characters is looked for among these.
                    if trims and isinstance(each, str):
                        meter.spend(size * len(each) // CHARS_A_UNIT)
            if check is not None:
                check(_FilterCall(self, value, size, more, kwargs))
            return meter.made(function(*args[:skip], value, *more, **kwargs))

        return metered

    def _metered_test(self, name: str, function: Any) -> Callable[..., Any]:
        meter = self.meter

        @wraps(function)
        def metered(value: Any, *args: Any) -> Any:
            meter.spend(_CALL)
            if name in _TESTS_OF_TEXT:
                meter.need(meter.weigh(value))
            elif name in _TESTS_OF_NUMBERS and isinstance(value, str):
                raise OverLimit(f"asks of a text whether it is {name}")
            return function(*map(meter.operand, (value, *args)))

        return metered


class _FilterCall(NamedTuple):
    """What a filter is given: the value, about how many characters that has, and the other arguments."""

    sandbox: TemplateSandbox
    value: Any
    size: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def meter(self) -> Meter:
        return self.sandbox.meter

    @property
    def others(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]


def _numbers(values: Iterable[Any]) -> list[int]:
    return [each for each in values if isinstance(each, int)]


def _texts(values: Iterable[Any]) -> list[str]:
    return [each for each in values if isinstance(each, str)]


def _at_most(limit: int) -> Callable[[_FilterCall], None]:
    def check(given: _FilterCall) -> None:
        for number in _numbers(given.others):
            if abs(number) > limit:
                raise OverLimit(f"gives a filter a number above {limit}")

    return check


def _check_parts(given: _FilterCall) -> None:
    _at_most(_MAX_PARTS)(given)
    if isinstance(given.value, Sized):
        given.meter.spend(0, ENTRY * len(given.value))


def _check_indent(given: _FilterCall) -> None:
    widths = [len(each) if isinstance(each, str) else each for each in given.others if each is not None]
    given.meter.need(given.size + (str(given.value).count("\n") + 1) * max(map(int, widths), default=4))


def _check_replace(given: _FilterCall) -> None:
    texts = [*given.args, *(given.kwargs[name] for name in ("old", "new") if name in given.kwargs)]
    if len(texts) > 1:
        given.meter.need(_replaced(str(given.value), texts[0], texts[1]))


def _check_join(given: _FilterCall) -> None:
    given.meter.need(given.size + max(map(len, _texts(given.others)), default=0) * len(given.value))


def _check_format(given: _FilterCall) -> None:
    given.sandbox._check_format(str(given.value), given.others)


def _check_json(given: _FilterCall) -> None:
    if any(each > _MAX_INDENT for each in _numbers(given.others)) or given.meter.weigh(given.others) > 256:
        raise OverLimit("gives tojson an indent or separators that are far too large")
    # A character may be written as \uXXXX, and an entry begins with its indent.
    given.meter.need(given.size * (6 + 4 * max(_numbers(given.others), default=0)))


def _check_round(given: _FilterCall) -> None:
    if isinstance(given.value, str | list | tuple):
        raise OverLimit("rounds a text or a list, which multiplies it")
    _at_most(_MAX_PRECISION)(given)


def _check_sort(given: _FilterCall) -> None:
    # Each attribute of each entry is put aside before anything is compared.
    size = given.size * (1 + sum(each.count(",") for each in _texts(given.others)))
    given.meter.need(size)
    given.meter.spend(size // CHARS_A_UNIT)


def _check_sum(given: _FilterCall) -> None:
    if any(inside_of(each) is not None for each in given.others):
        raise OverLimit("adds up lists by sum, which takes numbers only")


def _check_int(given: _FilterCall) -> None:
    if isinstance(given.value, str) and len(given.value) > _MAX_DIGITS:
        raise OverLimit(f"reads a number of more than {_MAX_DIGITS} digits")


def _check_unique(given: _FilterCall) -> None:
    attribute = given.kwargs.get("attribute", given.args[1] if len(given.args) > 1 else None)
    get = make_attrgetter(given.sandbox, attribute)
    for each in given.value:
        given.meter.key(get(each))


def _check_words(given: _FilterCall) -> None:
    """A list of a text's words or bytes is made."""
    given.meter.need(ENTRY * given.size)
    given.meter.spend(given.size // _CHARS_APART)


_FILTER_CHECKS: dict[str, Callable[[_FilterCall], None]] = {
    "batch": _check_parts,
    "center": _at_most(_MAX_PADDING),
    "float": _check_int,
    "format": _check_format,
    "indent": _check_indent,
    "int": _check_int,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_parts,
    "sort": _check_sort,
    "sum": _check_sum,
    "title": _check_words,
    "tojson": _check_json,
    "unique": _check_unique,
    "urlencode": _check_words,
    "wordcount": _check_words,
}


def _size_of_one(value: Sequence[Any]) -> int:
    return 1 if isinstance(value, str) else ENTRY


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
        self._env.meter.need(self._env.meter.weigh(value))
        return super().convert_field(value, conversion)
