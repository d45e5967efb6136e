"""Writes `renders.json`: what transformers makes of our templates and conversations.

Run by hand, in an environment with transformers (the file names the version): `python tests/text/make_renders.py`. The
tests need neither. The templates are our own; `dialect` uses every feature that published chat templates use.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] | trim + '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set first = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception("roles must alternate") }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}
    {{- (first if loop.first else '') ~ m['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
DIALECT = """{%- macro text(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content if part.type == 'text' -%}{{ part.text }}{{ '' if loop.last else '\n' }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, seen=[]) -%}
{%- for m in messages[::-1] -%}
    {%- set index = messages | length - 1 - loop.index0 -%}
    {%- if m.role == 'user' -%}{%- set ns.last = index -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- if tools -%}
# Tools ({{ tools | map(attribute='function.name') | join(', ') }})
    {% for tool in tools %}
{{ tool | tojson(indent=2) }}
    {% endfor %}
{{ tools | tojson }}
{%- endif -%}
{%- for m in messages -%}
    {%- if m.role == 'skip' -%}{%- continue -%}{%- endif -%}
    {%- set ns.seen = ns.seen + [m.role] -%}
    {%- set body = text(m.content) -%}
    {%- if m.role == 'assistant' and '</think>' in body -%}
        {%- set thought = body.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
        {%- set body = body.split('</think>')[-1].lstrip('\n') -%}
        {%- if loop.index0 > ns.last -%}({{ thought | upper }}){%- endif -%}
    {%- endif -%}
    [{{ '%02d' | format(loop.index) }} {{ m['role'] | capitalize }}{{ ' ' ~ m.name if m.name is defined else '' }}]
    {%- if m.role == 'assistant' %}{% generation %}{{ body }}{% endgeneration %}{% else %}{{ body }}{% endif -%}
    {%- for call in m.tool_calls or [] -%}
        {%- set f = call.function if call.function is defined else call -%}
<call={{ f.name }}>
        {%- for key, value in f.arguments | items -%}
            {{ key }}={{ value if value is string else value | tojson }};
        {%- endfor -%}
        {%- for key, value in f.arguments | dictsort -%}
            {{ key }}{{ ',' if not loop.last }}
        {%- endfor -%}
</call>
    {%- endfor -%}
    {{- '\n' -}}
{%- endfor -%}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{{ users | length }} of {{ messages | length }}: {{ ns.seen | unique | sort | join('/') }}
{%- if enable_thinking is defined and enable_thinking is false %} quiet{% endif %}
{{- ' ' + ('x' * 3) ~ (7 // 2) ~ (2 ** 3) ~ (10 % 4) ~ (1.5 | round | int) ~ ('{:>3}|{}'.format(1, 'a')) }}
{%- if add_generation_prompt %} -> {{ eos_token | replace('<', '[') | replace('>', ']') }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "dialect": DIALECT}

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2, "more": {"b": [1, 2.5, None, True]}}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The <weather> \"now\" & 'then'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Stadt ü 🦙"}}},
    },
}


def say(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": say(("user", "Hello"))},
    "no_prompt": {"messages": say(("user", "Hello")), "add_generation_prompt": False},
    "empty": {"messages": say(("user", ""))},
    "blank": {"messages": say(("user", "  \n\t "))},
    "system": {"messages": say(("system", " Be brief. "), ("user", "Hi"))},
    "multi": {"messages": say(("user", " a "), ("assistant", " b\n"), ("user", "c"))},
    "system_multi": {"messages": say(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))},
    "unicode": {"messages": say(("user", "Grüße 中文 🦙 e\u0301 \u2028 \x00"))},
    "html": {"messages": say(("user", "<b>\"x\" & 'y'</b> {{ bos_token }} {% if %}"))},
    "control": {"messages": say(("user", "<|im_end|><|eot_id|><end_of_turn><bos>"))},
    "thought": {"messages": say(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nyes"), ("user", "r"))},
    "open_thought": {"messages": say(("user", "q"), ("assistant", "<think>\nhm\n</think>\n\nyes"))},
    "wrong_order": {"messages": say(("assistant", "a"), ("user", "b"))},
    "quiet": {"messages": say(("user", "q")), "enable_thinking": False},
    "tools": {"messages": say(("user", "Weather?")), "tools": [TOOL, TOOL]},
    "call": {
        "messages": [
            *say(("user", "Weather?")),
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
            {"role": "tool", "name": "weather", "content": '{"t": 20}'},
            *say(("assistant", "20 degrees"), ("user", "Thanks")),
        ],
        "tools": [TOOL],
    },
    "parts": {"messages": say(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))},
    "long": {"messages": say(*(("user" if i % 2 == 0 else "assistant", f"turn {i}") for i in range(41)))},
}
BOS, EOS = "<bos>", "<eos>"


def main() -> None:
    import transformers
    from transformers.utils.chat_template_utils import _compile_jinja_template

    renders: dict[str, dict[str, str | None]] = {}
    for name, source in TEMPLATES.items():
        template = _compile_jinja_template(source)
        renders[name] = {case: render(template, given) for case, given in CONVERSATIONS.items()}
    content = {"made_with": f"transformers {transformers.__version__}", "renders": renders}
    Path(__file__).with_name("renders.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def render(template: Any, given: dict[str, Any]) -> str | None:
    """The text, or None where the template fails."""
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **given}
    try:
        return str(template.render(bos_token=BOS, eos_token=EOS, **variables))
    except Exception as error:
        print(type(error).__name__, error)
        return None


if __name__ == "__main__":
    main()
