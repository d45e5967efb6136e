"""Tool calls as the models of each family write them: written here by hand, from the chat templates of the families."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

from rlx.text.tool_calls import Part, Tool, checked_tools
from rlx.text.tool_calls.bare import GRANITE, LLAMA, MISTRAL_LIST, NEMOTRON, PROMPTED
from rlx.text.tool_calls.gemma import FUNCTION_GEMMA, GEMMA4
from rlx.text.tool_calls.headed import DEEPSEEK, HARMONY, KIMI, MISTRAL
from rlx.text.tool_calls.python import LFM2, OLMO
from rlx.text.tool_calls.tagged import GLM, HERMES, XML

Call = tuple[str, dict[str, Any]]
FORMATS = {
    each.name: each.of
    for each in (
        HERMES, XML, GLM, LLAMA, PROMPTED, MISTRAL_LIST, NEMOTRON, GRANITE, GEMMA4, FUNCTION_GEMMA, HARMONY, DEEPSEEK,
        MISTRAL, KIMI, LFM2, OLMO,
    )
}  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]},
        "any": {},
        "place": {"type": "object", "properties": {"name": {"type": "string"}, "floor": {"type": "integer"}}},
        "words": {"type": "array", "items": {"type": "string"}},
    },
}
TOOLS = checked_tools([
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look_up", "send-it")
])  # fmt: skip


def hermes(calls: list[Call]) -> str:
    bodies = (json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls)
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def xml(calls: list[Call]) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value(each)}\n</parameter>\n" for key, each in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def glm(calls: list[Call]) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value(each)}</arg_value>\n" for key, each in given.items())
        + "</tool_call>"
        for name, given in calls
    )


def listed(begin: str, end: str, calls: list[Call]) -> str:
    return begin + json.dumps([{"name": name, "arguments": given} for name, given in calls], ensure_ascii=False) + end


def mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given, ensure_ascii=False)}" for name, given in calls)


def kimi(calls: list[Call]) -> str:
    each = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    bodies = (each.format(name, i, json.dumps(given, ensure_ascii=False)) for i, (name, given) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{''.join(bodies)}<|tool_calls_section_end|>"


def python(calls: list[Call]) -> list[str]:
    return [f"{name}({', '.join(f'{key}={each!r}' for key, each in given.items())})" for name, given in calls]


def llama(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}, ensure_ascii=False) for name, given in calls)


def gemma(begin: str, end: str, quote: str, calls: list[Call]) -> str:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return quote + given + quote
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{value(each)}" for key, each in sorted(given.items())) + "}"
        return f"[{','.join(map(value, given))}]" if isinstance(given, list) else json.dumps(given)

    return "".join(f"{begin}call:{name}{value(given)}{end}" for name, given in calls)


def harmony(calls: list[Call]) -> str:
    header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    return "".join(header.format(name) + json.dumps(given, ensure_ascii=False) + "<|call|>" for name, given in calls)


def deepseek(calls: list[Call]) -> str:
    """The first call as V3.1 writes it, the others as V3 does."""
    forms = ["{}<｜tool▁sep｜>{}", *["function<｜tool▁sep｜>{}\n```json\n{}\n```"] * len(calls)]
    bodies = (
        form.format(name, json.dumps(given, ensure_ascii=False))
        for form, (name, given) in zip(forms, calls, strict=False)
    )
    whole = "\n".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{whole}<｜tool▁calls▁end｜>" if calls else ""


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": hermes,
    "xml": xml,
    "glm": glm,
    "mistral-list": lambda calls: listed("[TOOL_CALLS]", "", calls),
    "nemotron": lambda calls: listed("<TOOLCALL>", "</TOOLCALL>", calls),
    "granite": lambda calls: listed("<|tool_call|>", "", calls),
    "mistral": mistral,
    "kimi": kimi,
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(python(calls))}]<|tool_call_end|>",
    "olmo": lambda calls: "<function_calls>\n" + "\n".join(python(calls)) + "\n</function_calls>",
    "llama": llama,
    "prompted": lambda calls: f"```json\n{llama(calls)}\n```",
    "harmony": harmony,
    "deepseek": deepseek,
    "gemma4": lambda calls: gemma("<|tool_call>", "<tool_call|>", '<|"|>', calls),
    "functiongemma": lambda calls: gemma("<start_function_call>", "<end_function_call>", "<escape>", calls),
}


def joined(parts: list[Part]) -> list[str | tuple[str, str, str]]:
    """Texts, and calls as (id, name, arguments), in order."""
    found: list[str | tuple[str, str, str]] = []
    index = -1
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str):
            found[-1:] = [last + part] if isinstance(last, str) else [*found[-1:], part]
        elif part.id:
            assert part.name
            assert part.index == index + 1
            index += 1
            found.append((part.id, part.name, part.arguments))
        else:
            assert isinstance(last, tuple)
            assert part.index == index
            assert not part.name
            found[-1] = (last[0], last[1], last[2] + part.arguments)
    return found


def parsed(name: str, pieces: list[str], tools: tuple[Tool, ...] = TOOLS) -> list[str | tuple[str, str, str]]:
    """What the parser of a format makes of a text in pieces, joined; ids are numbers."""
    numbers = count()
    parser = FORMATS[name]().parser(tools, lambda: f"call_{next(numbers)}")
    return joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def split(text: str, cuts: list[int]) -> list[str]:
    """A text cut at some places."""
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]
