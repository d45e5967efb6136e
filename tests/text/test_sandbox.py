"""Hostile templates: none gets out of the sandbox, none gets much time or memory.

Every payload must end in an error that the budget or the sandbox raises; one that they miss would run for hours, which
the alarm turns into a failure.
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from rlx.errors import ChatTemplateError
from rlx.text import ChatTemplate, RenderLimits

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Fail after a minute; where Python code no longer runs (a hash of 2**40 values), end the process with a trace."""

    def ring(*_: object) -> None:
        pytest.fail("the template was not stopped")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    faulthandler.dump_traceback_later(90, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def render(source: str, limits: RenderLimits | None = None, **kwargs: Any) -> str:
    return ChatTemplate(source, "<bos>", "<eos>", limits).render(USER, **kwargs)


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
    "{% block x %}{% endblock %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].setdefault('a', 1) }}",
    "{{ (1).to_bytes(8, 'big') }}",
    "{{ (1).real.numerator }}",
    "{{ 'x'.encode() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_escape(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


# Lists that share their parts: 2**40 values in 40 steps.
TREES = (
    "{% set ns = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
BIG = "{% set big = 'x' * 100000 %}{% set list = range(99999) | list %}"
TREE_USES = [
    "{{ ns.a }}", "{{ ns.a | tojson }}", "{{ ns.a | string }}", "{{ ns.a ~ '' }}", "{{ ns.a | upper }}",
    "{{ ns.a | escape }}", "{{ ns.a | safe }}", "{{ ns.a | title }}", "{{ ns.a | wordcount }}", "{{ ns.a | trim }}",
    "{{ ns.a | indent }}", "{{ ns.a | truncate }}", "{{ ns.a | replace('a', 'b') }}", "{{ 'x' | replace('x', ns.a) }}",
    "{{ ns.a | format(1) }}", "{{ '%s' | format(ns.a) }}", "{{ '%s' % ns.a }}", "{{ '%s' % [ns.a] }}",
    "{{ '{}'.format(ns.a) }}", "{{ [1, 2] | join(ns.a) }}", "{{ [ns.a] | join }}", "{{ ', '.join([ns.a | string]) }}",
    "{{ ns.a == ns.b }}", "{{ ns.a != ns.b }}", "{{ ns.a < ns.b }}", "{{ ns.a is eq(ns.b) }}", "{{ ns.a in [ns.b] }}",
    "{{ ns.a is in([ns.b]) }}", "{{ ns.a is upper }}", "{{ [ns.b].index(ns.a) }}", "{{ [ns.b].count(ns.a) }}",
    "{{ [ns.a, ns.b] | sort }}", "{{ [ns.a, ns.b] | min }}", "{{ [ns.t] | unique | list | length }}",
    "{{ {'x': ns.a, 'y': ns.b} | dictsort(by='value') }}", "{{ [{'k': ns.a}, {'k': ns.b}] | groupby('k') | list }}",
    "{{ [ns.a] | select('equalto', ns.b) | list }}", "{{ [ns.a] | map('string') | list | length }}",
    "{{ {}[ns.t] }}", "{{ {ns.t: 1} }}", "{{ {}.get(ns.t) }}", "{{ ns.t in {1: 2} }}", "{{ dict([(ns.t, 1)]) }}",
    "{{ {'x': ns.a}.values() }}", "{{ raise_exception(ns.a) }}",
    "{% for i in [1, 2] %}{{ loop.changed(ns.a if i == 1 else ns.b) }}{% endfor %}",
]  # fmt: skip
PAYLOADS = [
    # one operation
    "{{ 'a' * 1000000000 }}", "{{ 1000000000 * 'a' }}", "{{ [1] * 1000000000 }}", "{{ 2 ** 100000000 }}",
    "{{ 9 ** 9 ** 9 }}", "{{ (10 ** 70) * (10 ** 70) }}", "{{ 0x" + "f" * 20000 + " }}", "{{ range(10 ** 12) }}",
    "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (1000000000, 1) }}", "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 1000000000) }}", "{{ '{:.1000000000f}'.format(1.5) }}",
    "{{ 'a' | center(1000000000) }}", "{{ 'a'.ljust(1000000000) }}", "{{ 'a'.zfill(1000000000) }}",
    "{{ '\n' | indent(1000000000) }}", "{{ [[1]] | tojson(indent=1000000000) }}", "{{ lipsum(n=100000) }}",
    "{{ 1.5 | round(1000000000, 'ceil') }}", "{{ ('f' * 100000) | int(base=16) }}", "{{ (1).to_bytes(10 ** 9) }}",
    "{{ [1] | batch(1000000000, 'x') | list }}", "{{ [1] | slice(1000000000) | list }}", "{{ 'x' | urlize }}",
    "{{ strftime_now('%Y' * 100000) }}", "{{ ('\x01' * 1000000) | tojson }}", "{{ ('<' * 1000000) | e | e }}",
    # one operation on something big
    BIG + "{{ list | join(big) }}", BIG + "{{ big.join(list | map('string')) }}", BIG + "{{ big | replace('', big) }}",
    BIG + "{{ big.replace('', big) }}", BIG + "{{ list | map('string') | map('replace', '', big) | list | length }}",
    BIG + "{{ ('\n' * 10000) | indent(big) }}", BIG + "{{ list | tojson(separators=(big, big)) }}",
    BIG + "{{ ('{0}' * 10000).format(big) }}", BIG + "{{ ('%(a)s' * 10000) % {'a': big} }}",
    BIG + "{{ big.strip('b' * 1000) }}", BIG + "{{ big | trim('b' * 1000) }}", BIG + "{{ ('a' * 900000).split('a') }}",
    BIG + "{{ [[1]] * 1000 | sum(start=[]) }}{{ [list] * 1000 | length }}", BIG + "{{ [list, list] | sum(start=[]) }}",
    BIG + "{{ ([big] * 100000) | join | length }}", BIG + "{{ ([big ~ '1', big ~ '2'] * 50000) | sort | length }}",
    # growth
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = ns.l + ['x' * 999999] %}{% endfor %}",
    "{% set ns = namespace(a=1) %}{% for i in range(40) %}{% set ns.a = namespace(x=ns.a, y=ns.a) %}{% endfor %}"
    "{{ [ns.a] }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    # loops
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in 'a' * 99999 %}{% endfor %}{% endfor %}",
    "{% set r = range(1000) | list %}{% for i in r recursive %}{% if loop.depth < 4 %}{{ loop(r) }}{% endif %}"
    "{% endfor %}",
    "{% for i in range(99999) %}" + "y" * 90000 + "{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "y" * 90000 + "{% endfor %}{% endset %}",
    BIG + "{% set x %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    BIG + "{% for i in range(99999) %}{% set y = -1 in list %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = 'x' in range(99999) %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = 'yx' in big %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = big.count('yx') %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = big[1:] %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = list[1:] %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = big | upper %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = big | title %}{% endfor %}",
    BIG + "{% for i in range(99999) %}{% set y = list | sort %}{% endfor %}",
    BIG + "{{ list | select('in', list) | list | length }}",
    "{% set a = 'x' * 500000 %}{% set b = 'x' * 500000 %}{% for i in range(99999) %}{% set y = a == b %}{% endfor %}",
    # calls
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(100) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f(1) %}" * 40 + "x" + "{% endcall %}" * 40,
    # the compiler
    "a" * 200_000, "{{ a }}" * 10_000, "{{ 1" + "~1" * 20_000 + " }}", "{{ 1" + "<2" * 20_000 + " }}",
    "{{ " + "(" * 7000 + "1" + ")" * 7000 + " }}", "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "{% for i in [1] %}" * 100 + "{% endfor %}" * 100, "{{ " + "[" * 7000 + "]" * 7000 + " }}",
    "{{ " + "not " * 8000 + "1 }}", "{{ a" + ".b" * 8000 + " }}",
]  # fmt: skip


@pytest.mark.parametrize("use", TREE_USES)
def test_shared_lists_are_counted_before_they_are_touched(use: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"too many steps|cannot do"):
        render(TREES + use)


@pytest.mark.parametrize("source", PAYLOADS, ids=lambda source: source[:60])
def test_no_payload_gets_far(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_limits_are_settings() -> None:
    source = "{% for i in range(5000) %}x{% endfor %}"
    assert render(source) == "x" * 5000
    with pytest.raises(ChatTemplateError, match="too many steps"):
        render(source, RenderLimits(steps=500))
    with pytest.raises(ChatTemplateError, match=r"the result has more than \d+ characters"):
        render(source, RenderLimits(chars=10))
    with pytest.raises(ChatTemplateError, match="39 characters, more than 20"):
        render(source, RenderLimits(template_chars=20))
    with pytest.raises(ChatTemplateError, match="more than 10 words and signs"):
        render(source, RenderLimits(template_tokens=10))


def test_long_conversations_get_more_room() -> None:
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
