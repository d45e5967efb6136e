"""Chat templates: what honest ones need works, and hostile ones neither get out nor get much time or memory.

The limits are those of a process, so that a few payloads show them all: whatever a template does takes CPU time, memory
or output.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlx.errors import ChatTemplateError
from rlx.text import ChatTemplate
from rlx.text import chat as chat_module
from rlx.text.confined import Confined

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplate(source, "<bos>", "<eos>").render(USER, **kwargs)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ [''|attr('__cla' ~ 'ss__')] }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ {}.__class__ }}",
    "{{ (1).__class__ }}",
    "{{ messages.__class__ }}",
    "{{ messages[0].__class__ }}",
    "{{ messages[0]['__class__'].x }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ range.__call__.__self__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace.mro() }}",
    "{{ dict.mro() }}",
    "{{ dict.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ config }}{{ config.items() }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__class__}'|string).format('') }}",
    "{{ ['{0.__class__}']|map('format', '')|list }}{{ ''.format.__self__.__class__ }}",
    "{% set f = ''.format %}{{ f.__globals__ }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ''.join.__self__.__class__ }}",
    "{{ messages|map(attribute='__class__')|list|first|attr('x') }}{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|map(attribute='__class__.__mro__')|list|join }}{{ x.__class__.y }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ messages|groupby('__class__')|list }}{{ ().__class__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% set ns = namespace() %}{{ ns.__class__ }}{{ ns._Namespace__attrs.x }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% from '/etc/passwd' import x %}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].setdefault('a', 1) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_escape(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


# Lists that share their parts: 2**40 values in 40 steps.
TREES = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
SLOW = [
    "{% for i in range(3000) %}{{ range(99999) | max }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% set n = 9 ** 999 %}{% for i in range(9) %}{% for j in range(99999) %}{% set y = n * n * n %}{% endfor %}"
    "{% endfor %}{{ 9 ** 9999999 % 7 }}",
    TREES + "{{ ns.a == ns.b }}",
]
BIG = [
    "{{ 'a' * 1000000000 }}", "{{ [1] * 1000000000 }}", "{{ '%1000000000d' % 1 }}", "{{ 'a' | center(1000000000) }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a='x') %}{% for i in range(27) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
]  # fmt: skip
MALFORMED = [
    "{{ " + "(" * 7000 + "1" + ")" * 7000 + " }}", "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{% for i in [1] %}" * 100 + "{% endfor %}" * 100, "{{ " + "[" * 7000 + "]" * 7000 + " }}",
    "{{ 0x" + "f" * 20000 + " }}", "{{ range(10 ** 12) }}", "{{ lipsum(n=100000) }}", "{{ 'x' | nothing }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ [ns] | tojson }}",
]  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renderer that gives up sooner."""
    monkeypatch.setattr(chat_module, "_RENDERER", Confined("dialect.py", memory=512 << 20, cpu_seconds=0.3))


@pytest.mark.system("limits")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("source", SLOW, ids=range(len(SLOW)))
def test_cpu_time_is_limited(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="more CPU time than"):
        render(source)
    assert render("{{ 1 }}") == "1"  # in a new process


@pytest.mark.system("limits")
@pytest.mark.parametrize("source", BIG, ids=range(len(BIG)))
def test_memory_is_limited(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"too much memory|the result has more than"):
        render(source)


@pytest.mark.parametrize("source", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_template(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_long_conversations_fit() -> None:
    """A template may build its text by appending, which is quadratic: honest work must fit."""
    source = (
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out ~ m.role ~ ': ' ~ m.content %}"
        "{% if m.content in ['x', 'y'] %}{{ raise_exception('no') }}{% endif %}{% endfor %}{{ ns.out }}"
    )
    messages = [{"role": "user", "content": "lorem ipsum " * 40} for _ in range(400)]
    assert len(ChatTemplate(source).render(messages)) == 400 * (len("user: ") + 480)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' in 'abc' }} {{ 1 in [1, 2] }} {{ 'x' not in {'y': 1} }}", "True True True"),
        ("{{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 3 >= 3 }} {{ 'b' != 'a' }}", "True False True True"),
        ("{{ 7 // 2 }} {{ 7 % 4 }} {{ 7 / 2 }} {{ -7 + 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }}", "3 3 3.5 -5 1024 0.5"),
        ("{{ 'x' * 3 }} {{ [1] + [2] }} {{ (1, 2) + (3,) }} {{ 'a' + 'b' }}", "xxx [1, 2] (1, 2, 3) ab"),
        ("{{ 'ab'.join(['x', 'y']) }} {{ 'a-b'.split('-') }} {{ 'xxa'.lstrip('x') }}", "xaby ['a', 'b'] a"),
        ("{{ 'aXbX'.replace('X', '--', 1) }} {{ 'aaa' | replace('a', 'b', 2) }}", "a--bX bba"),
        ("{{ '{:>4}|{:<4}|{:^5}|{x!r}'.format(1, 'a', 2, x='y') }}", "   1|a   |  2  |'y'"),
        ("{{ '%s-%03d-%.2f%%' % ('a', 7, 1.5) }} {{ '%5s' | format('x') }}", "a-007-1.50%     x"),
        ("{{ [3, 1, 2] | sort | join('<') }} {{ [1, 2] | sum }} {{ [1, 1] | unique | list }}", "1<2<3 3 [1]"),
        ("{{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': 1} | items | list }}", "[('a', 2), ('b', 1)] [('a', 1)]"),
        ("{{ {'a': '<é>'} | tojson }} {{ [1] | tojson(separators=(',', ':')) }}", '{"a": "<é>"} [1]'),
        ("{{ none }}{{ true }}{{ 1.5 }}{{ nothing }}{{ nothing is defined }}", "NoneTrue1.5False"),
        ("{{ 'a\nb' | indent(2) }}|{{ ' x ' | trim }}|{{ 'abc'[1:] }}|{{ 'abc'[::-1] }}", "a\n  b|x|bc|cba"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}", "1/2:1 2/2:3 "),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.first }}{{ loop.last }}{% endfor %}", "a1TrueTrue"),
        ("{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        (
            "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{% call f(1) %}!{% endcall %}",
            "12!",
        ),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}{% filter upper %}q{% endfilter %}", "A1Q"),
        ("{% set x = namespace(n=0) %}{% for i in range(3) %}{% set x.n = x.n + i %}{% endfor %}{{ x.n }}", "3"),
        (
            "{{ 'ABC' | lower | capitalize }} {{ 'a b' | title }} {{ 'x' is string }} {{ 5 is odd }}",
            "Abc A B True True",
        ),
        ("{{ messages | map(attribute='role') | first }} {{ messages[-1]['content'] }}", "user Hi"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ dict(a=1).get('b', 'no') }} {{ {'items': 3}['items'] }} {{ ('a', 'b').index('b') }}", "no 3 1"),
        ("{% generation %}g{{ 1 }}{% endgeneration %}{{ bos_token }}{{ eos_token }}", "g1<bos><eos>"),
        ("{{ '5' | int + 1 }} {{ '1.5' | float }} {{ 2.567 | round(1) }} {{ -3 | abs }}", "6 1.5 2.6 3"),
    ],
)
def test_what_honest_templates_need(source: str, text: str) -> None:
    assert render(source) == text
