"""From the messages of a request to the prompt of a conversation, and how the answer to it is read; for all APIs.

Server stage, under `model.py`; runs in worker threads. An API says which kinds of parts a content may have, and which
messages its own become. Here is what they are read with, field by field, and OpenAI's form, which is the one that chat
templates know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlx.engine.request import Context
from rlx.grammar import Grammar, after_thinking
from rlx.grammar.answers import calls_grammar
from rlx.json_file import JsonObject
from rlx.prompt import Prompt
from rlx.runners.media import MEDIA
from rlx.serve import record
from rlx.serve.custom_tools import INPUT, InputParser
from rlx.serve.errors import OVERFLOW, ApiError, context_overflow, invalid
from rlx.serve.http import shown
from rlx.serve.media import base64_source, load_images
from rlx.serve.model import FILE, fill_in_ids
from rlx.serve.openai.bodies import MediaPrompt
from rlx.text.answer import AnswerParser, ThinkingTags, kept_ids, tool_format
from rlx.text.chat import thinking_variables
from rlx.text.tool_calls import Tool, ToolChoice, ToolFormat, checked_choice, checked_tools

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel


class JsonValue:
    """A value of a request and its place, such as `messages[0].content`, which errors name.

    Attributes:
        value: as JSON has it.
        where: its place.
    """

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where

    def get(self, name: str) -> JsonValue:
        """A field of an object; its value is None if there is none."""
        return JsonValue(self.value.get(name), f"{self.where}.{name}".lstrip("."))

    def each(self) -> list[JsonValue]:
        """The objects of an array.

        Raises:
            ApiError: it is something else.
        """
        if not isinstance(self.value, list):
            raise invalid(self.where, f"expected an array, found {shown(self.value)}")
        return [JsonValue(value, f"{self.where}[{i}]").checked() for i, value in enumerate(self.value)]

    def checked(self) -> JsonValue:
        """The field, which has an object.

        Raises:
            ApiError: it has something else.
        """
        if not isinstance(self.value, Mapping):
            raise invalid(self.where, f"expected an object, found {shown(self.value)}")
        return self

    def text(self, name: str | None = None) -> str:
        """The string that it is, or that its field `name` is.

        Raises:
            ApiError: it is none.
        """
        if name is not None:
            return self.get(name).text()
        if not isinstance(self.value, str):
            what = "it is required" if self.value is None else f"expected a string, found {shown(self.value)}"
            raise invalid(self.where, what)
        return self.value

    def arguments(self) -> JsonObject:
        """The arguments of a call, an object or the text of one, as an object: templates write it in their own way.

        Raises:
            ApiError: it is neither.
        """
        found = self.value
        try:
            found = (json.loads(found) if found.strip() else {}) if isinstance(found, str) else found
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping) and self.value is not None:
            raise invalid(self.where, f"expected the text of a JSON object, found {shown(self.value)}")
        return dict(found or {})


# ---------------------------------------------------------------------------------------------- contents

Part = JsonObject
Kinds = Mapping[str, Callable[[JsonValue], Sequence[Part]]]
"""The kinds of parts of an API -> the parts of chat that one becomes."""


def texts(name: str = "text") -> Callable[[JsonValue], list[Part]]:
    """Reads a part that is the text of a field."""
    return lambda part: [{"type": "text", "text": part.text(name)}]


def parts_of(part: JsonValue, kinds: Kinds) -> Sequence[Part]:
    """The parts of chat that a part becomes.

    Raises:
        ApiError: the API has no such kind.
    """
    kind = part.checked().value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        what = f"parts of type {shown(kind)} are not supported here, expected {', '.join(kinds)}"
        raise invalid(f"{part.where}.type", what, code="unsupported_content")
    return kinds[kind](part)


def content_of(content: JsonValue, kinds: Kinds) -> str | list[Part]:
    """A content: a text, or parts of which one is no text.

    Raises:
        ApiError: it is something else.
    """
    if isinstance(content.value, str):
        return content.value
    if not isinstance(content.value, list):
        found = "it is required" if content.value is None else f"found {shown(content.value)}"
        raise invalid(content.where, f"{found}, expected a string or an array of parts")
    return joined([part for each in content.each() for part in parts_of(each, kinds)])


def joined(parts: Sequence[Part]) -> str | list[Part]:
    """Parts as one text, if all of them are texts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def text_and_images(content: str | list[Part]) -> tuple[str, list[Part]]:
    """The text of a content, and its images: templates have these in messages of users only."""
    if isinstance(content, str):
        return content, []
    text = "\n".join(part["text"] for part in content if part["type"] == "text")
    return text, [part for part in content if part["type"] != "text"]


def call_of(name: str, arguments: JsonObject, ident: str | None = None) -> JsonObject:
    """A call of a message of the assistant."""
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if ident is None else {"id": ident, **found}


# ---------------------------------------------------------------------------------------------- chat

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _as_it_is(part: JsonValue) -> list[Part]:
    """An image, which `media.py` reads."""
    return [dict(part.value)]


_KINDS: Kinds = {
    **dict.fromkeys(("text", "input_text", "output_text"), texts()), "refusal": texts("refusal"),
    **dict.fromkeys(("image_url", "input_image", "image"), _as_it_is),
}  # fmt: skip


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Messages in OpenAI's form as chat templates take them. A developer speaks as the system.

    Raises:
        ApiError: there is none, or one is malformed; the error names the field.
    """
    if not messages:
        raise invalid("messages", "it is empty", "send at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(sent: Any, where: str) -> JsonObject:
    message = JsonValue(sent, where).checked()
    fields = message.value = _modern(sent)
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"expected {', '.join(ROLES)}, found {shown(role)}")
    found: JsonObject = {"role": ROLES[role]}
    if isinstance(fields.get("name"), str):
        found["name"] = fields["name"]
    if role == "tool":
        found["tool_call_id"] = message.text("tool_call_id")
    if role == "assistant":
        if (thinking := fields.get("reasoning_content") or fields.get("reasoning")) is not None:
            found["reasoning_content"] = JsonValue(thinking, f"{where}.reasoning_content").text()
        if fields.get("tool_calls"):
            found["tool_calls"] = [_call(call) for call in message.get("tool_calls").each()]
        if fields.get("content") is None:
            refusal = fields.get("refusal")
            if not found.keys() & {"tool_calls", "reasoning_content"} and not isinstance(refusal, str):
                raise invalid(f"{where}.content", "there is neither content nor a tool call")
            return found | {"content": refusal if isinstance(refusal, str) else ""}
    return found | {"content": content_of(message.get("content"), _KINDS)}


def _modern(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in today's form: calls and results once had the name of the function in place of an id."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": f"call_{message.get('name')}"}
    call = message.get("function_call")
    if isinstance(call, Mapping) and not message.get("tool_calls"):
        return {**message, "tool_calls": [{"id": f"call_{call.get('name')}", "type": "function", "function": call}]}
    return message


def _call(call: JsonValue) -> JsonObject:
    ident = call.value["id"] if isinstance(call.value.get("id"), str) else None
    if isinstance(call.value.get("custom"), Mapping):
        custom = call.get("custom")
        return call_of(custom.text("name"), {INPUT: custom.text("input")}, ident)
    function = call.get("function").checked()
    return call_of(function.text("name"), function.get("arguments").arguments(), ident)


def merged_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the system at the beginning become one: chat templates take one."""
    found = list(messages)
    leading = next((i for i, each in enumerate(found) if each["role"] != "system"), len(found))
    if leading > 1 and all(isinstance(each["content"], str) for each in found[:leading]):
        text = "\n\n".join(each["content"] for each in found[:leading])
        found[:leading] = [{"role": "system", "content": text}]
    return found


#: What a chat template gets from elsewhere, and arguments of the functions that render it.
RESERVED = frozenset({
    "tokenizer", "model", "messages", "tools", "trust_content", "images", "takes_images", "bos_token", "eos_token",
    "continue_final_message", "check",
})  # fmt: skip


def checked_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further variables of a chat template.

    Raises:
        ApiError: one of them has a field of its own, or is not for requests to set.
    """
    found = dict(variables or {})
    for name in found:
        if name in RESERVED:
            raise invalid(f"chat_template_kwargs.{name}", "it cannot be set here", "leave it out")
    adds = found.get("add_generation_prompt", True)
    if not isinstance(adds, bool):
        raise invalid("add_generation_prompt", f"expected true or false, found {shown(adds)}")
    return found


def last_answer(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last message, which an answer is to continue.

    Raises:
        ApiError: it is not the assistant's, or calls tools.
    """
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        what = "only a text of the assistant can be continued"
        raise ApiError(400, f"messages[{len(messages) - 1}]: {what}", param="continue_final_message")
    return last


def check_continued(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a conversation of nothing but the message that the answer is to continue.

    Raises:
        ApiError: as said.
    """
    if all(message["role"] == "system" for message in messages[:-1]):
        hint = "begin with a message of the user"
        raise invalid("messages", "there is nothing before the message that the answer continues", hint)


NO_CALLS = ToolChoice("none")
ROOM = 4  # the part of the context that is left to the answer of a conversation that was cut: a fourth
_EFFORT, _SWITCH = "reasoning_effort", "enable_thinking"


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a conversation.

    Attributes:
        context: the checked prompt.
        parser: makes what splits an answer into reasoning, text and tool calls; None if all of it is text.
        keep_ids: control tokens that the parser reads.
        tags: around reasoning; None if there is none.
        thinks: whether the prompt ends inside the reasoning.
        tool_format, tools, choice, parallel: what may be called, and how the model writes it.
        begins: whether the answer is a new one: it may begin with reasoning.
    """

    context: Context
    parser: Callable[[], AnswerParser] | None = None
    keep_ids: frozenset[int] = frozenset()
    tags: ThinkingTags | None = None
    thinks: bool = False
    tool_format: ToolFormat | None = None
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = NO_CALLS
    parallel: bool = True
    begins: bool = True


def chat_prompt(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel: bool = True,
    variables: Mapping[str, Any] | None = None,
    continues: bool = False,
    splits: bool = True,
    custom: frozenset[str] = frozenset(),
) -> ChatPrompt:
    """The prompt of a conversation, formatted with the model's chat template, and how its answer is read.

    Args:
        messages: as `checked_messages` makes them; images are parts `image_url`, or see `ImageSource`.
        tools: functions that the model may call, in OpenAI's form.
        tool_choice: whether it has to call them, in OpenAI's form.
        parallel: whether an answer may have several calls.
        variables: further variables of the template, such as `enable_thinking` and `add_generation_prompt`.
        continues: whether the answer continues the last message, which must be the assistant's.
        splits: whether reasoning is split from the text.
        custom: names of the tools whose calls have an input in place of arguments.

    Raises:
        ChatTemplateError, MultimodalError, ImageError: as `Model.chat`.
        ToolError: the tools or the choice are invalid.
        ApiError: there is no message, or the prompt is longer than the context.
    """
    tokenizer, variables = model.tokenizer, checked_variables(variables)
    if not messages:
        raise invalid("messages", "it is empty", "send at least one message")
    known = checked_tools(tools or ())
    choice = checked_choice(tool_choice, known)
    offered = list(tools) if tools and choice.mode != "none" else None
    last = last_answer(messages) if continues else None
    model.check_length(_texts(messages), "messages")
    if all(isinstance(message.get("content"), str) for message in messages):
        plain = [dict(message) for message in messages]
    else:
        plain = load_images(messages, model.options, model.runner.supports_multimodal)
    checked = merged_system(plain)

    def check(text: str) -> None:
        model.check_length([text], "messages")

    prompt = model.runner.chat_ids(checked[:-1] if last else checked, offered, check=check, **variables)
    tags = model.tags
    ids = list(prompt.ids if isinstance(prompt, Prompt) else prompt)
    thinks = tags is not None and tags.is_open(tokenizer, ids)
    if last is not None:
        prompt, thinks = _continued(model, prompt, last, tags if thinks else None), False
    context = model.checked(prompt, "messages")
    kept = kept_ids(tokenizer, tags, None)
    if not splits or last is not None:
        tags = None
    form = tool_format(tokenizer) if offered else None
    found = partial(
        ChatPrompt, context, tags=tags, thinks=thinks, choice=choice, parallel=parallel, begins=not continues
    )
    if tags is None and form is None:
        return found(keep_ids=frozenset() if splits else kept)
    callable_tools = known if offered else ()
    make = partial(InputParser, custom) if custom else AnswerParser
    return found(
        parser=partial(make, tags, thinks, form, callable_tools),
        keep_ids=kept | kept_ids(tokenizer, None, form),
        tool_format=form,
        tools=callable_tools,
    )


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _continued(
    model: ServedModel, prompt: list[int] | Prompt, last: Mapping[str, Any], tags: ThinkingTags | None
) -> list[int] | Prompt:
    """A prompt that goes on with the text of the assistant's last message.

    Args:
        tags: those that the prompt has opened; they are closed before the text.
    """
    thinking = last.get("reasoning_content", "")
    text = last["content"] if tags is None else f"{thinking}\n{tags.end}\n\n{last['content']}"
    model.check_length([text], "messages")
    more = model.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    if isinstance(prompt, Prompt):
        return Prompt([*prompt.ids, *more], prompt.images)
    return [*prompt, *more]


# ---------------------------------------------------------------------------------------------- too long ones


def fitting_prompt(
    model: ServedModel, messages: Sequence[JsonObject], answer: int | None, *, cuts: bool, **how: Any
) -> ChatPrompt:
    """The prompt of a conversation, without its oldest turns if it is too long, as in Ollama and OpenAI's Responses.

    What is kept begins with a message of the user, so that every chat template takes it. Messages of the system stay,
    and so does the last message of the user with what follows it. The header
    `X-Rlx-Ignored` then names the messages that the prompt lacks, as in `messages[0..6]`.

    Args:
        answer: tokens that the answer may have, which a prompt that is cut leaves room for; None for no limit.
        cuts: whether turns may go.
        how: as for `chat_prompt`.

    Raises:
        ApiError: even the last turn is too long, or turns may not go.
    """
    try:
        return chat_prompt(model, messages, **how)
    except ApiError as error:
        starts = [i for i, each in enumerate(messages) if each["role"] == "user"][1:]
        if error.code != OVERFLOW or not cuts or not starts:
            raise
    context = model.runner.max_seq
    room = min(context // ROOM, context if answer is None else answer)
    low, high = 0, len(starts) - 1
    while low < high:  # every prompt takes a template, so only a few of them are made
        at = (low + high) // 2
        fits = _fits(model, _kept(messages, starts[at]), context - room, how)
        low, high = (low, at) if fits else (at + 1, high)
    prompt = chat_prompt(model, _kept(messages, starts[low]), **how)
    record.ignore(f"messages[{_first(messages)}..{starts[low] - 1}]")
    return prompt


def _fits(model: ServedModel, messages: list[JsonObject], most: int, how: Mapping[str, Any]) -> bool:
    """Whether the prompt of messages has at most so many tokens."""
    try:
        return len(chat_prompt(model, messages, **how).context) <= most
    except ApiError as error:
        if error.code != OVERFLOW:
            raise
        return False


def _kept(messages: Sequence[JsonObject], start: int) -> list[JsonObject]:
    return [each for i, each in enumerate(messages) if i >= start or each["role"] == "system"]


def _first(messages: Sequence[JsonObject]) -> int:
    """The first message that is not the system's."""
    return next(i for i, each in enumerate(messages) if each["role"] != "system")


# ---------------------------------------------------------------------------------------------- reasoning


def effort_variables(model: ServedModel, effort: str | None, field: str) -> dict[str, Any]:
    """The template's variables for an effort; nothing for None.

    A template that only knows whether the model reasons is told so: `none` is off, any other effort is on.

    Args:
        field: what the effort is called in the request.

    Raises:
        ApiError: the model always reasons, and shall not.
    """
    if effort is None:
        return {}
    template = model.tokenizer.chat_template or ""
    if _EFFORT in template:
        switch = {_SWITCH: effort != "none"} if _SWITCH in template else {}
        return {_EFFORT: effort, **switch}
    if effort != "none" and _SWITCH not in template:
        record.ignore(field)  # it reasons as it always does, or never
        return {}
    return switch_variables(model, effort != "none", field, effort)


def switch_variables(model: ServedModel, thinks: bool | None, field: str, value: object = None) -> dict[str, Any]:
    """The template's variables for reasoning that is on or off; nothing for None.

    Agents ask every model to reason. One that cannot answers without.

    Raises:
        ApiError: the model always reasons, and shall not.
    """
    if thinks is None:
        return {}
    if _SWITCH in (model.tokenizer.chat_template or ""):
        return thinking_variables(model.tokenizer, thinks, field)
    if thinks == (model.tags is not None):
        return {}
    if thinks:
        record.ignore(field)
        return {}
    shown = value if value is not None else thinks
    what = f"{shown!r} is not possible: the model always reasons before it answers"
    raise invalid(field, what, "leave the field out")


# ---------------------------------------------------------------------------------------------- grammars


def grammar_maker(
    model: ServedModel, make: Callable[[], Grammar] | None, prompt: ChatPrompt | None = None
) -> Callable[[], Grammar | None] | None:
    """The maker of the grammar of an answer, ready for the model; None where it is free.

    Where calls are forced, the answer is nothing but calls. Where the model decides, calls follow their schemas, and an
    answer without a call follows the grammar of the text. It begins after the model's thinking.

    Args:
        make: makes the grammar of the text; None for free text.
        prompt: of a conversation, which may offer tools.

    Returns:
        It raises a `ToolError` where tools are forced, or strict, and the schema of one cannot be enforced, or the
        grammar of the text cannot stand beside tools; a `GrammarError` where the grammar cannot be compiled.
    """
    return None if make is None and (prompt is None or not prompt.tools) else partial(_made, model, make, prompt)


def _made(model: ServedModel, make: Callable[[], Grammar] | None, prompt: ChatPrompt | None) -> Grammar | None:
    found = None if make is None else make()
    if prompt is not None and prompt.tool_format is not None and prompt.tools:
        text = None if prompt.choice.forced else found
        found = calls_grammar(prompt.tool_format, prompt.tools, prompt.choice, prompt.parallel, text)
    if found is None:
        return None
    if prompt is not None and prompt.begins:
        found = after_thinking(found, model.tokenizer, prompt.context.ids)
    model.runner.grammars.compile(found)  # kept for the generation
    return found


MAX_PROMPTS = 2048


def prompts(found: Any, field: str) -> list[tuple[Any, str]]:
    """The single prompts of a field, with their places: a text or a list of ids is one, a list of texts or of lists is
    several.

    A list that has ids beside texts is one prompt, too.

    Raises:
        ApiError: there is none, or too many.
    """
    if not isinstance(found, list):
        return [(found, field)]
    if not found:
        raise invalid(field, "it is empty", "give at least one prompt")
    if any(isinstance(part, int) for part in found):
        if any(isinstance(part, list) for part in found):
            raise invalid(field, "it has ids beside lists", "put the ids into a list, too")
        return [(found, field)]
    if len(found) > MAX_PROMPTS:
        raise invalid(field, f"expected at most {MAX_PROMPTS} prompts, found {len(found)}")
    return [(each, field if len(found) == 1 else f"{field}[{i}]") for i, each in enumerate(found)]


def prompt_ids(model: ServedModel, prompt: Any, field: str, adds: bool) -> list[int]:
    """The ids of one prompt: of a text, or of a list of ids and texts. Control tokens in texts count as such.

    Args:
        adds: whether a text at the beginning gets the model's BOS.

    Raises:
        ApiError: it is empty or far too long, or an id is outside the vocabulary.
        TokenizerError: a text cannot be encoded.
    """
    ids, vocab_size, most = list[int](), model.runner.vocab_size, model.runner.max_seq
    for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
        if isinstance(part, str):
            model.check_length([part], field)
            ids += model.tokenizer.encode(part, add_special_tokens=adds and not i, parse_special=True)
            if len(ids) > 2 * most:
                raise context_overflow(len(ids), most, field)
        elif 0 <= part < vocab_size:
            ids.append(part)
        else:
            raise invalid(f"{field}[{i}]", f"there is no token {shown(part)} in a vocabulary of {vocab_size}")
    if not ids:
        raise invalid(field, "the prompt is empty", "give at least one token")
    return ids


def media_prompt(model: ServedModel, prompt: MediaPrompt, field: str, adds: bool) -> list[int] | Prompt:
    """A text with images in it, in base64; `<__media__>` stands for each.

    Raises:
        ApiError: there is not one image for each place, or the text is far too long.
        MultimodalError, ImageError: the model takes no images, or one cannot be used.
    """
    data, text = prompt.multimodal_data or [], prompt.prompt_string
    if not data:
        return prompt_ids(model, text, f"{field}.prompt_string", adds)
    if (places := text.count(MEDIA)) != len(data):
        what = f"there are {len(data)}, and {places} places for them in prompt_string"
        raise invalid(f"{field}.multimodal_data", what, f"write {MEDIA} where an image belongs")
    model.check_length([text], field)
    parts = [base64_source(each, f"{field}.multimodal_data[{i}]").part for i, each in enumerate(data)]
    (read,) = load_images([{"content": parts}], model.options, model.runner.supports_multimodal)
    return model.runner.with_images(text, [part["image"] for part in read["content"]])


def filled_in(
    model: ServedModel,
    prompt: str,
    suffix: str,
    extra: Sequence[tuple[str, str]] = (),
    fields: tuple[str, str] = ("prompt", "suffix"),
) -> list[int]:
    """The ids that ask for what stands between two texts.

    Args:
        extra: names and texts of other files, which come first; behind `FILE`, if the model has this token.
        fields: what the request calls the two texts.

    Raises:
        ApiError: the model has no tokens for it, or a text is far too long.
    """
    tokenizer = model.tokenizer
    for text, field in zip((prompt, suffix), fields, strict=True):
        model.check_length([text], field)
    model.check_length([part for file in extra for part in file], "input_extra")
    if (tokens := fill_in_ids(tokenizer)) is None:
        what = "the model has no tokens for filling in"
        raise invalid(fields[1], what, "leave it out, or serve a model for code", code="unsupported_parameter")
    before, after, middle = tokens
    encode = partial(tokenizer.encode, add_special_tokens=False)
    head = [] if (file_id := tokenizer.token_to_id(FILE)) is None else [file_id]
    files = [[*head, *encode(f"{name}\n{text}\n")] for name, text in extra]
    return [*tokenizer.prefix, *chain(*files), before, *encode(prompt), after, *encode(suffix), middle]
