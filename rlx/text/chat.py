"""Chat templates: messages to the text, and the ids, that a model was trained to answer.

Text stage, used by the runners. Where the template comes from is `tokenizer.py`; how it is rendered is `dialect.py`.

No control token and no image comes of what somebody wrote: before a template is rendered, marks take the place of
special tokens in the messages; afterwards the marks become text again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.arguments import function, nearest
from rlx.errors import ArgumentError, ChatTemplateError, MultimodalError
from rlx.json_file import read_text
from rlx.text.confined import NOT_STARTED, Confined, ConfinedError
from rlx.text.tokenizer import SpecialSplitter, Tokenizer, TokenType
from rlx.text.tool_calls.tools import has_calls, prompted, with_calls

if TYPE_CHECKING:
    from rlx.text.image_parts import ImageTokens


class EscapedMessages:
    """Messages in which marks stand for special tokens; `encode` takes them out of the rendered text.

    A mark is plain letters and digits, which survive quoting; where a template changes one nevertheless, the text is
    spoilt, but no control token comes of it. Assistant messages may hold control tokens, but no images.

    Args:
        messages: checked ones.
        images: the tokens of images, which no message may hold; None if the model takes none.
        tools: descriptions of tools, None if there are none. They may come from strangers, too.
        trusted: whether control tokens in any message count as such.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[dict[str, Any]],
        images: ImageTokens | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        trusted: bool = False,
    ) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._given, self._is_marked = [*messages, *(tools or ())], False
        self._names = images.names(tokenizer) if images else {}
        self._texts = list(self._names)
        media = SpecialSplitter({text: at for at, text in enumerate(self._texts)}) if self._names else None
        # Tokens of other types than CONTROL are found in any text: what is encoded must not contain them as a whole.
        found = {text: token in tokenizer.encode(text, False) for text, token in self._names.items()}
        self._cut = SpecialSplitter({text: at for at, text in enumerate(self._texts) if found[text]})
        self.messages = [self._escaped(m, media, trusted or m["role"] == "assistant") for m in messages]
        self.tools = None if tools is None else [self._escaped(tool, media, trusted) for tool in tools]

    @cached_property
    def _mark(self) -> str:
        """A word that occurs in no text, before the number of a token and what kind it is."""
        self._is_marked = True
        return _unused_word(_texts(self._given))

    def _escaped(self, value: Any, media: SpecialSplitter | None, trusted: bool) -> Any:
        if isinstance(value, str):
            if media is not None:
                parts = media.split(value)
                value = "".join(p if isinstance(p, str) else f"{self._mark}{p}i" for p in parts)
            parts = [value] if trusted else self._tokenizer.control_splitter.split(value)
            return "".join(part if isinstance(part, str) else f"{self._mark}{part}x" for part in parts)
        if isinstance(value, dict):
            return {key: self._escaped(part, media, trusted) for key, part in value.items()}
        return [self._escaped(part, media, trusted) for part in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text: control tokens and images that stand in it are the template's."""
        if self._images is not None:
            text = self._images.spread(text)
        if not (self._is_marked and self._mark in text) and self._is_whole(text):
            return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        ids: list[int] = []
        for part in self._splitter.split(text):
            ids += [part] if isinstance(part, int) else self._plain(part)
        return ids

    def _is_whole(self, text: str) -> bool:
        """Whether the tokenizer finds the tokens of all images in a text."""
        images = self._images
        if images is None or images.text not in text:
            return True
        return self._tokenizer.encode(images.text, False, parse_special=True) == [images.written]

    @property
    def _splitter(self) -> SpecialSplitter:
        if not self._names:
            return self._tokenizer.control_splitter
        control = {self._tokenizer.id_to_token(token): token for token in self._tokenizer.special_ids}
        return SpecialSplitter(control | self._names)

    def _plain(self, text: str) -> list[int]:
        """The ids of a text between control tokens, with what the marks stand for as text."""
        text = re.sub(rf"{self._mark}(\d+)([xi])", self._marked, text)
        ids: list[int] = []
        begun = ""
        for part in self._cut.split(text):
            if isinstance(part, str):
                begun += part
                continue
            first, rest = self._texts[part][:1], self._texts[part][1:]
            ids += self._tokenizer.encode(begun + first, False)
            begun = rest
        return ids + self._tokenizer.encode(begun, False)

    def _marked(self, found: re.Match[str]) -> str:
        number = int(found[1])
        return self._texts[number] if found[2] == "i" else self._tokenizer.id_to_token(number)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def _unused_word(texts: Sequence[str]) -> str:
    """A word that occurs in none of `texts`, the same one every time."""
    words = (f"qz{i}token" for i in count())
    return next(word for word in words if not any(word in text for text in texts))


_QUESTION, _ANSWER = {"role": "user", "content": "qzquestion"}, {"role": "assistant", "content": "qzanswer"}


def turn_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """The control token behind an answer, if the template puts the same one there before a next turn and at the end.

    A token that follows in one case only belongs to something else, such as the head of the next turn. If the template
    cannot be rendered the result is empty; using the template raises its error.
    """
    if tokenizer.chat_template is None:
        return frozenset()
    try:
        template = template_of(tokenizer)
        last, inner = (_behind_answer(tokenizer, template, messages) for messages in ([], [_QUESTION]))
    except ChatTemplateError:
        return frozenset()
    return frozenset({last}) if last is not None and last == inner else frozenset()


def _behind_answer(tokenizer: Tokenizer, template: ChatTemplate, more: list[dict[str, str]]) -> int | None:
    """The control token that follows the answer in a conversation that goes on with `more`, spaces aside."""
    text = template.render([_QUESTION, _ANSWER, *more], add_generation_prompt=False)
    _, found, behind = text.partition(_ANSWER["content"])
    for first in tokenizer.control_splitter.split(behind.lstrip()) if found else ():
        return first if isinstance(first, int) and tokenizer.vocabulary.types[first] == TokenType.CONTROL else None
    return None


_ARGUMENT = "chat_template"
_JINJA = ("{{", "{%")
_HEADED = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>{{ '\n\n' }}"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
_TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else 'user' }}{{ '\n' }}"
    "{{ message.content | trim }}<end_of_turn>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model{{ '\n' }}{% endif %}"
)
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
NAMED = {"chatml": _CHATML, "llama3": _HEADED, "gemma": _TURNS}
"""The forms that have a name: those of Qwen and many others, of Llama 3, and of Gemma 1 to 3."""


def template_text(value: Any) -> str:
    """The source of a chat template.

    Args:
        value: a path, a name of `NAMED`, or the source itself, which is a text with `{{` or `{%`.

    Raises:
        ArgumentError: it is none of these, or the file cannot be read.
    """
    if isinstance(value, str) and any(mark in value for mark in _JINJA):
        return value
    if isinstance(value, str) and value in NAMED:
        return NAMED[value]
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ArgumentError(f"{value!r} is no path", where=_ARGUMENT, hint="name a file with a Jinja template")
    file = Path(os.fsdecode(value)).expanduser()
    try:
        return read_text(file, ArgumentError)
    except ArgumentError as error:
        hint = f"name a file with a Jinja template, or one of {', '.join(NAMED)}"
        raise ArgumentError(f"{str(value)[:200]!r}: {error.what}", where=_ARGUMENT, hint=hint) from None


Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MEANT = {"bot": ["assistant"], "ai": ["assistant"], "model": ["assistant"], "human": ["user"]}
_MAX_DEPTH = 64
_SCALARS = (str, int, float, bool, type(None))
_WHERE = "chat template"
_PROBE = "qzcontent"  # stands for a text, to see what a template does with it
_THINKING = "enable_thinking"  # the name that templates have for the switch
MAX_TEMPLATE_CHARS = 1 << 20
_MEMORY = 512 << 20  # of the process that renders
_SHORT = 4_096  # characters of a conversation
_HOSTILE = "the model's template is broken or hostile"
_SLOW = "try again: the machine was busy or asleep, or the model's template is hostile"
_RENDERER = Confined("dialect.py", memory=_MEMORY)  # starts with the first template


def get_ready() -> None:
    """Starts the process that renders templates: it gets ready while a model opens. What fails is said by the first
    template.
    """
    with suppress(ConfinedError):
        _RENDERER.start()


class ChatTemplate:
    """A Jinja chat template. It is rendered in a process of its own, which limits its time and memory.

    Args:
        template: the source, as `tokenizer_config.json` or `tokenizer.chat_template` holds it.
        bos_token, eos_token: what the template sees under these names.

    Raises:
        ChatTemplateError: the template is too long. Whether it is a template shows when it is rendered.
    """

    def __init__(self, template: str, bos_token: str = "", eos_token: str = "") -> None:
        if len(template) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(
                f"the template has {len(template)} characters, at most {MAX_TEMPLATE_CHARS} are allowed", where=_WHERE
            )
        self._template, self._tokens = template, {"bos_token": bos_token, "eos_token": eos_token}
        self._broken: ChatTemplateError | None = None  # it took too much even for a short conversation
        try:
            _RENDERER.start()
        except ConfinedError as error:
            raise _template_error(error) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
            messages: `role` (text) and `content`: a text, parts such as `{"type": "text", "text": ...}`, or nothing
                beside `tool_calls`. Other keys are handed to the template. Contents stay as they are; see `fitted`.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the head of the model's answer.
            kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: a message is malformed, the template refuses it or fails, or rendering takes more than
                2 s of CPU time or 512 MB.
        """
        checked = None if tools is None else _checked_tools(tools)
        return self.rendered(_checked_messages(messages), checked, add_generation_prompt, **kwargs)

    def rendered(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """As `render`, of messages and tools that are checked."""
        values = {
            "messages": self._with_known_roles(messages),
            "tools": tools,
            "documents": None,
            **{name: _plain(value, name) for name, value in kwargs.items()},
        }
        return self._render({**values, "add_generation_prompt": add_generation_prompt})

    def _with_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Checked messages; a role that templates pass over in silence, and this one does not name, is an error."""
        for i, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", self._template):
                close = _MEANT.get(role.lower()) or nearest(role, ROLES, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"the roles are {', '.join(ROLES)}"
                raise ChatTemplateError(f"the model knows no role {role!r:.80}", where=f"messages[{i}].role", hint=hint)
        return messages

    def fitted(self, messages: Sequence[Message], takes_images: bool = False) -> list[dict[str, Any]]:
        """Messages whose contents have the form that the template takes.

        Text parts are joined with line breaks for a template that takes texts only; a text becomes a part for one that
        takes parts only.

        Args:
            takes_images: whether parts may be images, too.

        Raises:
            ChatTemplateError: a message is malformed.
            MultimodalError: a content has a part that is no text and no image that may be there.
        """
        checked = _checked_messages(messages)
        _refuse_media(checked, takes_images)
        return [self.fit(message) for message in checked]

    def fit(self, message: dict[str, Any]) -> dict[str, Any]:
        """A checked message whose content has the form that the template takes."""
        content = message.get("content")
        if isinstance(content, str) and self._takes_parts and not self._takes_texts:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self._takes_parts:
            return {**message, "content": "\n".join(part["text"] for part in content if part["type"] == "text")}
        return message

    @property
    def source(self) -> str:
        """The source of the template."""
        return self._template

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template shows the model the tools that it is given."""
        parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": []}
        tool = {"type": "function", "function": {"name": _PROBE, "description": "x", "parameters": parameters}}
        conversation = [{"role": "user", "content": "x"}]
        return self._tried(conversation, [tool]) not in ("", self._tried(conversation))

    @cached_property
    def takes_several_calls(self) -> bool:
        """Whether a message of the assistant may have several tool calls."""
        call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        both, one = (
            self._tried([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}])
            for calls in ([call, call], [call])
        )
        return both not in ("", one)

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a message of the system."""
        messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}]
        return _PROBE in self._tried([self.fit(message) for message in messages])

    def _tried(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The text that a template makes of a conversation; nothing if it refuses it."""
        values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            return self._render(values)
        except ChatTemplateError:
            return ""

    @cached_property
    def _takes_texts(self) -> bool:
        """Whether a content that is a text comes out as that text."""
        return self._shows(_PROBE)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the text of a part comes out, and nothing else of the part."""
        return self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Any) -> bool:
        text = self._tried([{"role": "user", "content": content}])
        return _PROBE in text and repr(_PROBE) not in text and f'"{_PROBE}"' not in text

    def _render(self, values: dict[str, Any]) -> str:
        if self._broken is not None:
            raise self._broken
        try:
            return str(_RENDERER.call({"template": self._template, "values": self._tokens | values}))
        except ConfinedError as error:
            found = _template_error(error)
            if found.hint == _HOSTILE and len(repr(values["messages"])) < _SHORT:
                self._broken = found
            raise found from error
        except ValueError as error:  # of JSON: a number of more than 4,300 digits
            what = f"the conversation cannot be handed to the template ({error})"
            raise ChatTemplateError(what, where=_WHERE) from error


def _template_error(error: ConfinedError) -> ChatTemplateError:
    """The error of a template that its process could not render."""
    where = _WHERE if error.line is None else f"{_WHERE}, line {error.line}"
    what, hint = str(error), None
    if error.kind == "Refused":
        what = f"the template refuses the conversation: {what}"
    elif error.kind == NOT_STARTED:
        what, hint = f"the template cannot be rendered: {what}", "try again; the machine may be too busy"
    elif error.kind == "TimeoutError":
        what, hint = f"the template cannot be rendered: {what}", _SLOW
    elif error.kind in ("RecursionError", "MemoryError", None):
        what, hint = f"the template cannot be rendered: {what}", _HOSTILE
    return ChatTemplateError(what, where=where, hint=hint)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"expected a list of messages, found a {type(messages).__name__}", where="messages")
    if not messages:
        raise ChatTemplateError("the conversation is empty", where="messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"expected role and content, found a {type(message).__name__}", where=where)
    plain: dict[str, Any] = _plain(message, where)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"expected a role such as 'user', found {role!r}", where=f"{where}.role")
    if plain.get("content") is None and not plain.get("tool_calls"):
        raise ChatTemplateError("there is neither content nor a tool call", where=f"{where}.content")
    _check_content(plain.get("content"), f"{where}.content")
    return plain


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ChatTemplateError(f"expected a text or a list of parts, found a {type(content).__name__}", where=where)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ChatTemplateError("a part needs a type, such as 'text'", where=f"{where}[{i}]")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ChatTemplateError("a text part needs a text", where=f"{where}[{i}].text")


def _checked_tools(tools: Any) -> list[Any]:
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise ChatTemplateError(f"expected a list of tools, found a {type(tools).__name__}", where="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatTemplateError(f"expected a JSON schema, found a {type(tool).__name__}", where=f"tools[{i}]")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` in the types of JSON: what a template may touch."""
    if depth > _MAX_DEPTH:
        raise ChatTemplateError(f"nested more than {_MAX_DEPTH} deep", where=where)
    if type(value) in _SCALARS:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ChatTemplateError(f"key {odd[0]!r} is no text", where=where)
        return {
            key: part if type(part) in _SCALARS else _plain(part, f"{where}.{key}", depth + 1)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(part, f"{where}[{i}]", depth + 1) for i, part in enumerate(value)]
    raise ChatTemplateError(f"a {type(value).__name__} is no JSON value", where=where)


@lru_cache(maxsize=16)
def _compiled(template: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(template, bos_token, eos_token)


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> ChatTemplate:
    """The tokenizer's template, its `tool_use` one where `tools` are given and it has one; kept compiled.

    Raises:
        ChatTemplateError: the model has no chat template.
    """
    templates = tokenizer.chat_templates
    source = templates.get("tool_use") if tools else None
    source = source if source is not None else templates.get("default")
    if source is None:
        raise ChatTemplateError(
            "the model has no chat template", where=_WHERE,
            hint="it may be a base model: give it a plain prompt, or open it with `chat_template`",
        )  # fmt: skip
    bos, eos = ("" if i is None else tokenizer.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return _compiled(source, bos, eos)


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    trust_content: bool = False,
    images: ImageTokens | None = None,
    check: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> list[int]:
    """The prompt ids of a conversation. BOS is there if the template puts it there.

    The control tokens that the template writes become ids. The text of a control token inside a message stays text, so
    that a user cannot close a turn and speak for the system; assistant messages and, with `trust_content`, all of them
    are parsed like the template. No message can write an image: a part `{"type": "image"}` is one placeholder id.

    A template that knows no tools gets messages that describe them; see `rlx.text.tool_calls.tools`.

    Args:
        images: the tokens of images; None if the model takes none.
        check: gets the text before it is encoded, and may raise.

    Raises:
        ChatTemplateError: there is no template, or it cannot be rendered.
        ToolError: a tool call in a message is malformed.
        MultimodalError: a content has a part that the model does not take, or the template leaves images out.
    """
    template, fitted, tools = _fitted(tokenizer, messages, tools, images is not None)
    escaped = EscapedMessages(tokenizer, fitted, images, tools=tools, trusted=trust_content)
    text = template.rendered(escaped.messages, escaped.tools, add_generation_prompt, **kwargs)
    if check is not None:
        function("check", check)(text)
    ids = escaped.encode(text)
    if images is None:
        return ids
    written = images.count(ids)
    if written != images.images:
        what = f"the template writes {written} of the {images.images} images of the conversation"
        raise MultimodalError(
            what, where=_WHERE, hint="it may be made for text: use the template of the model's authors"
        )
    return images.expanded(ids)


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    takes_images: bool = False,
    **kwargs: Any,
) -> str:
    """The text of a conversation, to look at: control tokens, and what looks like one in a message, are the same in it.

    Raises:
        ChatTemplateError, ToolError, MultimodalError: as `chat_ids`.
    """
    template, fitted, tools = _fitted(tokenizer, messages, tools, takes_images)
    return template.rendered(fitted, tools, add_generation_prompt, **kwargs)


def _fitted(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, takes_images: bool
) -> tuple[ChatTemplate, list[dict[str, Any]], list[Any] | None]:
    """The template of a conversation, and messages and tools in the form that it takes."""
    checked = _checked_tools(tools) if tools else None
    template = template_of(tokenizer, tools=checked is not None)
    fitted = template.fitted(messages, takes_images=takes_images)
    if checked or has_calls(fitted):
        fitted, checked = _with_tools(template, fitted, checked)
    return template, fitted, checked


def _with_tools(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools for a template: both, or messages alone, which say it all, if it knows no tools."""
    if template.takes_tools:
        return with_calls(messages, template), tools
    return [template.fit(message) for message in prompted(messages, tools or [], template)], None


def _refuse_media(messages: Sequence[dict[str, Any]], takes_images: bool) -> None:
    """`MultimodalError` for a part that is neither text nor, where the model takes them, an image."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] != "text" and not (takes_images and part["type"] == "image"):
                takes = "text and images" if takes_images else "text only"
                raise MultimodalError(
                    f"a part has type {part['type']!r}, and the model takes {takes}",
                    where=f"messages[{i}].content[{j}]", hint="leave the part out",
                )  # fmt: skip


def thinking_variables(tokenizer: Tokenizer, thinking: bool | None, where: str) -> dict[str, Any]:
    """The variables that tell the chat template whether the model reasons before it answers; nothing for None.

    Args:
        where: what the caller's interface calls the switch, for messages.

    Raises:
        ChatTemplateError: the template has no such switch.
    """
    if thinking is None:
        return {}
    if _THINKING not in (tokenizer.chat_template or ""):
        what = f"the model's chat template has no {_THINKING}"
        raise ChatTemplateError(what, where=where, hint="leave it out")
    return {_THINKING: thinking}
