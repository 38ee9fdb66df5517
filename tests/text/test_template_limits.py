"""A chat template is a stranger's program: it ends in an error before it costs much time or memory."""

import asyncio
import resource
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Answer, Front

from chairlift.errors import InvalidRequest, UnsupportedModel
from chairlift.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, TooSlow
from chairlift.text.template_sandbox import Budget, OverLimit, TemplateSandbox

MESSAGES = [{"role": "user", "content": "hi"}]
# Sixty levels of lists, each of which holds the one before twice: small in memory, and endless to look through.
TWICE = "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}"
TWICE += "{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
LARGE = "{% set x = 'a' * 4000000 %}"
# Numbers that all have the hash 0.
CLASHING = "range(0, 10**5 * (2**61 - 1), 2**61 - 1)"
MACRO = "m" * 50000
# Terabytes, were they written out.
COPIES = LARGE + "{% set l = [x] * 600000 %}"
OF_COPIES = (
    *("sort", "string", "lower", "upper", "capitalize", "title", "trim", "e", "forceescape", "center", "wordcount"),
    *("unique | list", "groupby(0)", "indent", "replace('a', 'b')", "format(1)", "join", "urlencode", "safe", "tojson"),
)
TOO_MUCH = [
    *(f"{COPIES}{{{{ (l | {each}) | length }}}}" for each in OF_COPIES),
    COPIES + "{{ '{!r}'.format(l) }}",
    COPIES + "{{ l is lower }}",
    COPIES + "{{ [].index(l) }}",
    "{% set r = range(100000) %}{% for i in range(2800) %}{% if 'a' in r %}{% endif %}{% endfor %}",
    "{% set x = range(1000) | list %}{% set l = [(range(999) | list) + [5]] * 10000 %}" + "{{ x in l }}" * 9,
    "{{ '%1000000000d' is even }}",
    "{{ '%1000000000d' is odd }}",
    "{{ '%1000000000d' is divisibleby(1) }}",
    "{{ 'a' | round(9, 'ceil') }}",
    "{{ [1] | round(9, 'floor') }}",
    LARGE + "{{ x.strip('b' * 1000000 ~ 'a') }}",
    LARGE + "{{ x | trim('b' * 1000000 ~ 'a') }}",
    LARGE + "{{ x.rsplit(sep='b' ~ x[2000000:]) }}",
    "{{ " + CLASHING + " | unique | list | length }}",
    "{{ dict(" + CLASHING + " | batch(2)) | length }}",
    "{{ {2**70: 1} }}",
    "{{ {1180591620717411303424: 1} }}",
    "{{ {'a': 1}.keys() - 'b' }}",
    "{{ (['0'] * 100000) | map(attribute='0.' * 100000 ~ '0') | list | length }}",
    "{{ [{'a': 'A' * 100000}] | sort(attribute='a,' * 100000 ~ 'a') }}",
    "{{ (('<!---->' * 500000) | safe).striptags() }}",
    "{% macro " + MACRO + "() %}{% endmacro %}{{ [" + MACRO + "] * 100000 }}",
    TWICE + "{{ raise_exception(ns.x) }}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ ['a' * 1000000] * 100000 }}",
    "{{ 10**(10**8) }}",
    "{{ 9**4000 * 9**4000 }}",
    "{{ ('9' * 5000) | int }}",
    "{{ 5 | round(-10**9) }}",
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}" + "x" * 50000 + "{% endfor %}",
    "{% set x %}{% for i in range(100000) %}" + "x" * 50000 + "{% endfor %}{% endset %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{{ ('a' * 1000) | center(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ '\t'.expandtabs(tabsize=10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{{ ('b' * 1000000) | replace('b', 'c' * 10000) }}",
    "{{ ('b' * 1000000).replace('b', 'c' * 10000) }}",
    "{{ ('a\n' * 100000) | indent(10**9) }}",
    "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "{{ (['x'] * 100000) | join('y' * 100000) }}",
    "{{ ('y' * 100000).join(['x'] * 100000) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [messages] | tojson(indent=10**9) }}",
    "{{ messages | map('tojson', indent=10**9) | list }}",
    "{{ [[1] * 1000] | sum(start=[]) }}",
    "{% filter center(10**10) %}a{% endfilter %}",
    DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLED + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLED + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(10000) %}{% set ns.x = ns.x + ['a' * 10000 ~ i] %}{% endfor %}",
    TWICE + "{{ ns.x }}",
    TWICE + "{{ ns }}",
    TWICE + "{{ ns.x ~ '' }}",
    TWICE + "{{ ns.x | tojson }}",
    TWICE + "{{ ns.x | string }}",
    TWICE + "{{ ns.x == ns.y }}",
    TWICE + "{{ ns.x in [ns.y] }}",
    TWICE + "{{ [ns.y] | select('eq', ns.x) | list }}",
    TWICE + "{{ [ns.x, ns.y] | map('list') | sort }}",
    TWICE + "{{ {ns.x: 1} }}",
    TWICE + "{{ {}[ns.x] }}",
    TWICE + "{{ {}.get(ns.x) }}",
    TWICE + "{{ [ns.y].index(ns.x) }}",
    TWICE + "{{ '%s' % (ns.x,) }}",
    TWICE + "{{ '{}'.format(ns.x) }}",
    TWICE + "{{ '{!r}'.format(ns.x) }}",
    "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    LARGE + "{% for i in range(10000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    LARGE + "{% for i in range(10000) %}{% if x[1:] %}{% endif %}{% endfor %}",
    LARGE + "{{ x.rfind('b' ~ x[2000000:]) }}",
    LARGE + "{% for i in range(1000) %}{{ x.split('a') | length }}{% endfor %}",
    LARGE + "{% for i in range(1000) %}{{ x.lstrip('a') }}{{ x | trim('b') }}{% endfor %}",
    "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "{{ (5).to_bytes(10**10) }}",
    "{{ (messages | map(attribute='role')).send(1) }}",
]
BROKEN = [
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in x %}" * 100 + "{% endfor %}" * 100,
    "x" * (MAX_TEMPLATE_CHARS + 1),
    "{{ 1" + "+1" * 20000 + " }}",
    "{{ 'a' | urlize }}",
    "{{ 'a' in ['a'] == true }}",
]


def render(template: str, quick: bool = False, size: int = 100, **arguments: Any) -> str:
    return ChatTemplate({"default": template}, {}).render(MESSAGES, True, arguments, size, quick)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An address space with room for a gigabyte more than there is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("template", TOO_MUCH)
def test_a_template_that_does_too_much_is_stopped(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the chat template.*stopped") as caught:
        render(template)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 300
    # The next one has a budget of its own.
    assert render("{{ messages[0].content * 3 }}") == "hihihi"


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_can_not_be_compiled_is_broken(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template is broken"):
        render(template)


def test_what_templates_do_is_within_the_limits() -> None:
    """One of everything that real templates use, as Jinja has it."""
    cases = {
        "{{ 'a' ~ 1 ~ none ~ [1] }}": "a1None[1]",
        "{{ 1 < 2 < 3 }} {{ 'a' in 'ab' }} {{ 2 not in [1] }}": "True True True",
        "{{ {'a' ~ 'b': 1}.ab }}{{ {'a': 1} | dictsort }}": "1[('a', 1)]",
        "{{ '%s-%03d' % ('a', 7) }} {{ '%s' | format('b') }} {{ '{:.2f} {}'.format(1.5, 'c') }}": "a-007 b 1.50 c",
        "{{ messages | map(attribute='role') | join(', ') }}": "user",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
        "{{ [3, 1, 2] | sort | reverse | list }} {{ [1, 1] | unique | list }} {{ [1, 2] | sum }}": "[3, 2, 1] [1] 3",
        "{{ 'a b'.split(' ') | last }}{{ 'xax'.strip('x') }}{{ 'ab'[::-1] }}{{ ' a ' | trim }}": "babaa",
        "{{ 'a-b' | replace('-', '+') }} {{ 'a\nb' | indent(2) }} {{ 'ab' | center(4) }}.": "a+b a\n  b  ab .",
        "{{ ['a', 'b'] | tojson(indent=2) }}": '[\n  "a",\n  "b"\n]',
        "{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}2{% endcall %}": "<12>",
        "{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ loop.last }}{% endfor %}": "1False2True",
        "{% for x in [[1], []] recursive %}({{ loop(x) if x is iterable }}){% endfor %}": "(())()",
        "{% set x %}a{% endset %}{{ x }}{% filter upper %}b{% endfilter %}{{ 2 ** 10 }}": "aB1024",
        "{{ range(3) | list }} {{ 'ab' | list }} {{ dict(a=1) | items | list }}": "[0, 1, 2] ['a', 'b'] [('a', 1)]",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}": "ab,",
        "{{ ('<' | e) + '<' }}": "&lt;&lt;",
        "{{ 1 in range(3) }} {{ 1 in missing }} {{ ('a' in 'ab') == true }} {{ not 'a' in {'a': 1} }}": (
            "True False True False"
        ),
        "{% set g = [1, 2, 3] | select('number') %}{{ 1 in g }} {{ g | list }}": "True [2, 3]",
        "{{ [1, 2] | select('in', [2, 3]) | list }} {{ [1, 2, 1].count(1) }} {{ (1, 2).index(2) }}": "[2] 2 1",
        "{{ {'b': 1, 2: 3, none: 4, 1.5: 5} }} {{ dict([['a', 1]], b=2) }}": (
            "{'b': 1, 2: 3, None: 4, 1.5: 5} {'a': 1, 'b': 2}"
        ),
        "{{ messages | unique(attribute='role') | list | length }} {{ ['a', 'A'] | unique | list }}": "1 ['a']",
        "{{ 4 is even }} {{ 4 is divisibleby(2) }} {{ 2.567 | round(1) }} {{ 'a' is lower }}": "True True 2.6 True",
        "{{ 'a b' | title }} {{ 'a b' | wordcount }} {{ 'a b' | urlencode }} {{ range(3) | string }}": (
            "A B 2 a%20b range(0, 3)"
        ),
    }
    for template, expected in cases.items():
        assert render(template) == expected, template


def work(template: str, **given: Any) -> int:
    """The units that a rendering takes."""
    sandbox, budget = TemplateSandbox(str, {}), Budget(10**8, 10**8)
    sandbox.render(sandbox.code_of(template), budget, given)
    return budget.work - sandbox.meter.work


@pytest.mark.parametrize(
    "expression",
    [
        *("'a' in l", "'a' not in l", "'a' in r", "'a' is in r", "'a' in d.values()", "('a', 1) in d.items()"),
        *("'a' in (l | reverse)", "['a'] | select('in', r) | list", "l.count('a')", "t.count('a')", "r.index(999)"),
        *("r | min", "r | sum", "r | sort", "l | reject('number') | list", "l | batch(1000) | first"),
        *("l | slice(1) | first", "m(*r)"),
    ],
)
def test_who_looks_at_all_entries_pays_for_all(expression: str) -> None:
    given = {
        "l": list(range(1000)),
        "r": range(1000),
        "t": tuple(range(1000)),
        "d": {str(at): at for at in range(1000)},
    }
    assert work("{% macro m() %}{{ varargs | length }}{% endmacro %}{{ " + expression + " }}", **given) >= 1000


def test_a_search_pays_for_the_size_of_what_it_looks_for() -> None:
    long, other = list(range(10_000)), list(range(10_000))
    for searched in ("l", "l | reverse", "l | map('list')"):
        assert work("{{ x in (" + searched + ") }}", x=[*long, 1], l=[other] * 100) >= 100 * 1000, searched
    assert work("{{ l.index(x) }}", x=long, l=[[*long, 1]] * 100 + [other]) >= 100 * 1000


def test_a_search_by_hash_costs_little() -> None:
    given = {"d": {str(at): at for at in range(100_000)}}
    for searched in ("d", "d.keys()"):
        assert work("{{ 'a' in " + searched + " }}", **given) < 100


@pytest.mark.parametrize("expression", [f"l | {each}" for each in OF_COPIES] + ["d | dictsort", "l | min", "l | max"])
def test_a_filter_makes_nothing_that_can_not_be_paid_for(expression: str) -> None:
    """Entries that are too short to be paid for by themselves."""
    given = {"l": ["A" * 1000] * 4000, "d": {"A" * 1000 + str(at): at for at in range(4000)}}
    assert peak("{{ (" + expression + ") | length }}", Budget(10**6, 10**6), given) < 2**20


@pytest.mark.parametrize(
    "expression",
    [
        *("t | list", "t | sort", "t | join", "t | slice(2) | list", "t | groupby(0)", "t | wordcount", "t | title"),
        *("t | urlencode", "t.split()", "t.split(' ')", "t.rsplit(sep=' ')", "t.splitlines()", "''.join(t)"),
    ],
)
def test_a_text_is_not_taken_apart_if_that_can_not_be_paid_for(expression: str) -> None:
    assert peak("{{ " + expression + " }}", Budget(10**6, 10**6), {"t": "ab " * 200_000}) < 2**20


def peak(template: str, budget: Budget, given: dict[str, Any]) -> int:
    """The bytes that a rendering has at most before it is stopped."""
    sandbox = TemplateSandbox(str, {})
    code = sandbox.code_of(template)
    tracemalloc.start()
    try:
        with pytest.raises(OverLimit, match="too much text"):
            sandbox.render(code, budget, given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_limits_grow_with_the_messages() -> None:
    """A long chat that is copied a few times is no attack."""
    long = "x" * 3_000_000
    template = "{% set ns = namespace(t='') %}{% for i in range(5) %}{% set ns.t = ns.t ~ text %}{% endfor %}{{ ns.t }}"
    assert len(render(template, size=len(long), text=long)) == 5 * len(long)


def test_a_quick_rendering_gives_up_soon_and_compiles_nothing() -> None:
    template = ChatTemplate({"default": "{% for i in range(10000) %}{{ i }}{% endfor %}", "tool_use": "t"}, {})
    with pytest.raises(TooSlow):
        template.render(MESSAGES, True, {}, 100, True)
    made = template.render(MESSAGES, True, {}, 100, False)
    assert made.endswith("9999")
    with pytest.raises(TooSlow):
        template.render(MESSAGES, True, {}, 100, True)
    template.render(MESSAGES, True, {"tools": [1]}, 100, False)
    assert template.render(MESSAGES, True, {"tools": [1]}, 100, True) == "t"


def test_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate({"default": "{% for i in range(60000) %}{{ i }}{% endfor %}"}, {})
    made: list[int] = []
    threads = [
        threading.Thread(target=lambda: made.append(len(template.render(MESSAGES, True, {}, 100, False))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [made[0]] * 4


def test_a_template_file_of_absurd_size_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(UnsupportedModel, match="1073741824 bytes"):
        ChatTemplate.from_folder(tmp_path, {}, {})


def test_a_chat_gets_a_400_and_other_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front()
    hostile = ChatTemplate({"default": "{{ messages[0].content * 10**10 }}"}, {})
    monkeypatch.setattr(front.tokenizer, "_chat_template", hostile)

    async def both() -> tuple[Answer, Answer]:
        return await front.chat(), await front.complete()

    refused, completed = asyncio.run(both())
    assert refused.status == 400
    assert "the chat template makes too much text" in refused.error["message"]
    assert completed.status == 200


def test_a_slow_template_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front()
    slow = ChatTemplate({"default": "{% for i in range(9000) %}{% if i == 1 %}{{ i }}{% endif %}{% endfor %}"}, {})
    monkeypatch.setattr(front.tokenizer, "_chat_template", slow)
    threads: list[str] = []
    render = slow.render

    def noted(*args: Any, **more: Any) -> str:
        made = render(*args, **more)
        threads.append(threading.current_thread().name)
        return made

    monkeypatch.setattr(slow, "render", noted)
    assert asyncio.run(front.chat()).status == 200
    assert len(threads) == 1
    assert threads[0].startswith("chairlift-large")
