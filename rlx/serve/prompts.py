"""The prompt of a conversation, and how the answer to it is read; from the words of all APIs.

Server stage, under `model.py`; runs in worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlx.engine.request.context import Context
from rlx.grammar import Grammar, after_thinking
from rlx.grammar.answers import calls_grammar
from rlx.prompt import Prompt
from rlx.runners.media import MEDIA
from rlx.serve import record
from rlx.serve.body import shown
from rlx.serve.conversation import checked_variables, last_answer, merged_system
from rlx.serve.custom_tools import InputParser
from rlx.serve.errors import OVERFLOW, ApiError, context_overflow, invalid
from rlx.serve.media import base64_source, load_images
from rlx.serve.model import fill_in_ids
from rlx.serve.openai.bodies import MediaPrompt
from rlx.text.answer import AnswerParser, ThinkingTags, kept_ids, tool_format
from rlx.text.chat import thinking_variables
from rlx.text.tool_calls import Tool, ToolChoice, ToolFormat, checked_choice, checked_tools

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel

JsonObject = dict[str, Any]
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
        messages: as `conversation.py` makes them; images are parts `image_url`, or see `ImageSource`.
        tools: functions that the model may call, in OpenAI's form.
        tool_choice: whether it has to call them, in OpenAI's form.
        parallel: whether an answer may have several calls.
        variables: further variables of the template, such as `enable_thinking` and `add_generation_prompt`.
        continues: whether the answer continues the last message, which must be the assistant's.
        splits: whether reasoning is split from the text.
        custom: names of the tools whose calls have an input in place of arguments.

    Raises:
        ChatTemplateError, MultimodalError, ImageError: as `TextRunner.chat`.
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
    checked = merged_system(load_images(messages, model.media, model.runner.supports_multimodal))

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
    """The texts that messages consist of."""
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


def prompts(found: Any, field: str) -> list[Any]:
    """The single prompts of a field: a text or a list of ids is one, a list of texts or of lists is several.

    A list that has ids beside texts is one prompt, too.

    Raises:
        ApiError: there is none, or too many.
    """
    if not isinstance(found, list):
        return [found]
    if not found:
        raise invalid(field, "it is empty", "give at least one prompt")
    if any(isinstance(part, int) for part in found):
        if any(isinstance(part, list) for part in found):
            raise invalid(field, "it has ids beside lists", "put the ids into a list, too")
        return [found]
    if len(found) > MAX_PROMPTS:
        raise invalid(field, f"expected at most {MAX_PROMPTS} prompts, found {len(found)}")
    return list(found)


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
    (read,) = load_images([{"content": parts}], model.media, model.runner.supports_multimodal)
    return model.runner.with_images(text, [part["image"] for part in read["content"]])


def filled_in(model: ServedModel, prompt: str, suffix: str) -> list[int]:
    """The ids that ask for what stands between two texts.

    Raises:
        ApiError: the model has no tokens for it, or a text is far too long.
    """
    tokenizer = model.tokenizer
    model.check_length([prompt], "prompt")
    model.check_length([suffix], "suffix")
    if (tokens := fill_in_ids(tokenizer)) is None:
        what = "the model has no tokens for filling in"
        raise invalid("suffix", what, "leave it out, or serve a model for code", code="unsupported_parameter")
    before, after, middle = tokens
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, suffix)]
    return [*tokenizer.prefix, before, *parts[0], after, *parts[1], middle]
