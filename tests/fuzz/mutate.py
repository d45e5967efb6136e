"""Mutants: files with something wrong in them, made from sound ones and a source of random numbers.

Bytes are flipped, cut and copied; JSON and GGUF metadata are also changed value by value, because a flipped bit in a
value is rarely one that gets far.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterator
from typing import Any

NUMBERS = [0, 1, -1, 2, 3, 7, 31, 255, 4095, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53]
NUMBERS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63)]
VALUES = [
    *NUMBERS, None, True, False, 0.0, -0.0, 0.5, 1e-45, 1e38, 1e308, float("nan"), float("inf"), float("-inf"),
    10**400, "", "x", "\ud800", "\0", "\x1b[2J", "a" * 70_000, "../../etc/passwd", "/dev/zero", "é" * 99, [], {}, [[]],
    [0], [-1], ["x"], [None], [[0, 1]], [1] * 5000, {"": 0}, {"a": {"b": []}}, ["a"] * 300,
    "@deep list@", "@deep object@", "@long number@", "@many lists@",
]  # fmt: skip
_RAW = {
    '"@deep list@"': "[" * 60_000 + "]" * 60_000,
    '"@deep object@"': '{"a":' * 60_000 + "0" + "}" * 60_000,
    '"@long number@"': "9" * 6_000,
    '"@many lists@"': "[" + "[]," * 200_000 + "0]",
}


def mutated_bytes(rng: random.Random, data: bytes, within: int | None = None, times: int | None = None) -> bytes:
    """`data` with a few changes among its first `within` bytes."""
    found = bytearray(data)
    for _ in range(times or rng.choice((1, 1, 1, 2, 4, 16))):
        if not found:
            break
        size = min(within or len(found), len(found))
        at = rng.randrange(size)
        match rng.randrange(8):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.randrange(256)
            case 2:
                width = rng.choice((1, 2, 4, 8))
                found[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
            case 3:
                del found[at:]
            case 4:
                del found[at : at + rng.choice((1, 4, 8, 100))]
            case 5:
                found[at:at] = rng.randbytes(rng.choice((1, 4, 8, 100)))
            case 6:
                other = rng.randrange(size)
                found[at : at + 16] = found[other : other + 16]
            case 7:
                found[at:at] = found[at : at + rng.choice((4, 32, 400))]
    return bytes(found)


def mutated_json(rng: random.Random, document: Any, times: int | None = None) -> bytes:
    """The document with a few values replaced, removed or copied; now and then text that is no JSON."""
    document = json.loads(json.dumps(document))
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            break
        within, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del within[key]
            case 1 if isinstance(within, dict):
                within[rng.choice(["", "x", key + "x", "\ud800"])] = within.pop(key)
            case 2:
                other, name = rng.choice(places)
                within[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else rng.choice(VALUES)
            case _:
                within[key] = rng.choice(VALUES)
    text = json.dumps(document)
    for mark, raw in _RAW.items():
        text = text.replace(mark, raw)
    if rng.random() < 0.05 and isinstance(document, dict) and document:
        name = json.dumps(rng.choice(list(document)))
        text = f"{{{name}: {json.dumps(rng.choice(NUMBERS))}, {text[1:]}"
    raw_bytes = text.encode()
    return mutated_bytes(rng, raw_bytes) if rng.random() < 0.1 else raw_bytes


def _keys(within: Any) -> Any:
    return within if isinstance(within, dict) else range(len(within))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of the values of a document; of long arrays the first few."""
    stack = [document]
    while stack:
        within = stack.pop()
        keys = list(within)[:64] if isinstance(within, dict) else range(min(len(within), 8))
        for key in keys:
            yield within, key
            if isinstance(within[key], dict | list):
                stack.append(within[key])


# -- GGUF -------------------------------------------------------------------------------------------------------------

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def gguf_parts(data: bytes) -> tuple[bytes, list[bytes], list[bytes], bytes]:
    """Magic with version and the two counts, key-value records, tensor records, and the rest of a sound file."""
    tensors, keys = struct.unpack_from("<QQ", data, 8)
    at, values, records = 24, [], []
    for _ in range(keys):
        end = _after_value(data, _after_text(data, at))
        values.append(data[at:end])
        at = end
    for _ in range(tensors):
        end = _after_text(data, at)
        end += 4 + 8 * struct.unpack_from("<I", data, end)[0] + 12
        records.append(data[at:end])
        at = end
    return data[:24], values, records, data[at:]


def _after_text(data: bytes, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", data, at)[0])


def _after_value(data: bytes, at: int, kind: int | None = None) -> int:
    if kind is None:
        kind, at = struct.unpack_from("<I", data, at)[0], at + 4
    if kind == 8:
        return _after_text(data, at)
    if kind != 9:
        return at + struct.calcsize(_SCALARS[kind])
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner != 8:
        return at + int(count) * struct.calcsize(_SCALARS[inner])
    for _ in range(count):
        at = _after_text(data, at)
    return at


def mutated_gguf(rng: random.Random, data: bytes) -> bytes:
    """A GGUF file with values of its metadata or records of its tensors replaced, or with bytes of its header."""
    head, values, records, rest = gguf_parts(data)
    size = len(data) - len(rest)
    if rng.random() < 0.3:
        return mutated_bytes(rng, data, within=rng.choice((24, size, size)))
    for _ in range(rng.choice((1, 1, 2))):
        parts = values if rng.random() < 0.75 else records
        if not parts:
            continue
        i = rng.randrange(len(parts))
        match rng.randrange(8):
            case 0:
                del parts[i]
            case 1:
                parts.insert(rng.randrange(len(parts)), parts[i])
            case 2:
                parts[i] = mutated_bytes(rng, parts[i], times=1)
            case _:
                name = parts[i][: _after_text(parts[i], 0)]
                parts[i] = name + (_value(rng) if parts is values else _record(rng, parts[i][len(name) :]))
    counts = struct.pack("<QQ", len(records), len(values)) if rng.random() < 0.9 else head[8:]
    header = head[:8] + counts + b"".join(values + records)
    return header + bytes(-len(header) % 32) + rest[-size % 32 :]


def _value(rng: random.Random) -> bytes:
    """A type and a value of it."""
    kind = rng.choice([*_SCALARS, 8, 9, 9, 9])
    if kind != 9:
        return struct.pack("<I", kind) + _scalar(rng, kind)
    inner, count = rng.choice([*_SCALARS, 8]), rng.choice((0, 1, 2, 3, 4, 7, 24, 512, 3000))
    one = _scalar(rng, inner)
    return struct.pack("<IIQ", 9, inner, count) + b"".join(
        one if rng.random() < 0.9 else _scalar(rng, inner) for _ in range(count)
    )


def _scalar(rng: random.Random, kind: int) -> bytes:
    if kind == 8:
        text = rng.choice([b"", b"x", b"\xff\xfe", b"\0", b"llama", b"<0x41>", b"{{ 1 }}", b"a" * 3000, b"\x1b[2J"])
        return struct.pack("<Q", len(text)) + text
    if kind in (6, 12):
        value = rng.choice([0.0, -1.0, 1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")])
        return struct.pack(_SCALARS[kind], value)
    if kind == 7:
        return bytes([rng.choice((0, 1, 1, 2, 255))])
    width = struct.calcsize(_SCALARS[kind])
    return (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")


def _record(rng: random.Random, record: bytes) -> bytes:
    """Dimensions, type and offset of a tensor, one of them another."""
    count = struct.unpack_from("<I", record)[0]
    dims = list(struct.unpack_from(f"<{count}Q", record, 4))
    kind, offset = struct.unpack_from("<IQ", record, 4 + 8 * count)
    match rng.randrange(5):
        case 0:
            dims[rng.randrange(count)] = rng.choice(NUMBERS) % (1 << 64)
        case 1:
            dims = [*dims, 1] if rng.random() < 0.5 else dims[:-1]
        case 2:
            rng.shuffle(dims)
        case 3:
            kind = rng.choice((*range(42), 255, 1 << 31))
        case 4:
            offset = rng.choice((*NUMBERS, offset + 32, offset - 32)) % (1 << 64)
    return struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


# -- templates and other texts ----------------------------------------------------------------------------------------

SNIPPETS = [
    "{% for i in range(99999) %}{{ range(i) | max }}{% endfor %}",
    "{% if messages %}x{% endif %}",
    "{{ messages }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% endfor %}",
    "{% if x %}",
    "{{ x.y.z }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'a' * 999999999 }}",
    "{{ ns.a }}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ ''.__class__ }}",
    "{{ self }}",
    "{{ loop }}",
    "{% macro m(a) %}{{ m(a) }}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "{{ cycler.__init__ }}",
    "{% include 'x' %}",
    "{{ raise_exception('x') }}",
    "{{ strftime_now('%Y' * 9999) }}",
    "{# ",
    " #}",
    "{% raw %}",
    "{{ 1 / 0 }}",
    "-%}",
    "{{ range(99999) | list | tojson }}",
    "{{ '%99999999d' % 1 }}",
    "{{ '{:99999999}'.format(1) }}",
    "{%- set x -%}",
    "{{ messages[0].content * 99999 }}",
    "{{ lipsum(9999) }}",
    "{{ 'x' | center(99999999) }}",
    "{{ dict(a=1) }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "\ud800",
    "{{ '\\ud800' }}",
    "\x00",
    "}}",
    "{{",
    "{{ 'a' | replace('', 'a' * 9999) | replace('a', 'b' * 9999) }}",
    "{{ messages | sort }}",
    "{{ none.x }}",
]
_WORD = re.compile(r"\w+|[^\w\s]")


def mutated_text(rng: random.Random, text: str, snippets: list[str]) -> str:
    """A text with words replaced, removed or copied, and snippets put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        words = list(_WORD.finditer(text))
        if not words:
            return rng.choice(snippets)
        one, two = rng.choice(words), rng.choice(words)
        match rng.randrange(6):
            case 0:
                text = text[: one.start()] + text[one.end() :]
            case 1:
                text = text[: one.start()] + two[0] + text[one.end() :]
            case 2:
                text = text[: one.start()] + str(rng.choice(NUMBERS)) + text[one.end() :]
            case 3:
                begin, end = sorted((one.start(), two.end()))
                text = text[:begin] + text[begin:end] * rng.choice((0, 2, 3)) + text[end:]
            case _:
                text = text[: one.start()] + rng.choice(snippets) + text[one.start() :]
    return text


_TAG = re.compile(r"\{[{%#].*?[}%#]\}", re.DOTALL)
_CLASSES = [re.compile(pattern) for pattern in (r"\b[a-z_]\w*\b", r"\b\d+\b", r"'[^']*'", r"[-+*/~|.]|==|!=|<|>")]


def mutated_template(rng: random.Random, text: str) -> str:
    """A template most of whose mutants are templates: snippets stand between tags, words replace words of a kind."""
    if rng.random() < 0.3:
        return mutated_text(rng, text, SNIPPETS)
    for _ in range(rng.choice((1, 2, 3, 6))):
        tags = list(_TAG.finditer(text))
        if rng.random() < 0.5 or not tags:
            at = rng.choice([0, len(text), *(tag.end() for tag in tags)])
            text = text[:at] + rng.choice(SNIPPETS) + text[at:]
        else:
            tag, kind = rng.choice(tags), rng.choice(_CLASSES)
            places, words = list(kind.finditer(tag[0])), kind.findall(text)
            if places:
                place = rng.choice(places)
                begin, end = tag.start() + place.start(), tag.start() + place.end()
                text = text[:begin] + rng.choice([*words, "99999", "range", "messages"]) + text[end:]
    return text
