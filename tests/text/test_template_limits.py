"""A chat template is a stranger's program: it ends in an error before it costs much time or memory."""

import asyncio
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Answer, Front

from chairlift.errors import InvalidRequest, UnsupportedModel
from chairlift.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, TooSlow

MESSAGES = [{"role": "user", "content": "hi"}]
# Sixty levels of lists, each of which holds the one before twice: small in memory, and endless to look through.
TWICE = "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}"
TWICE += "{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
LARGE = "{% set x = 'a' * 4000000 %}"
TOO_MUCH = [
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
    }
    for template, expected in cases.items():
        assert render(template) == expected, template


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
