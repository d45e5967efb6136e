"""The prompt of a conversation, and how the answer to it is read.

Server stage, under `model.py`; runs in worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlx.engine.request.context import Context
from rlx.prompt import Prompt
from rlx.serve.conversation import checked_messages, checked_variables, last_answer, merged_system
from rlx.serve.media import load_images
from rlx.text.answer import AnswerParser, ThinkingTags, kept_ids
from rlx.text.tool_calls import Tool, ToolChoice, ToolFormat, checked_choice, checked_tools

if TYPE_CHECKING:
    from rlx.serve.generation import Parser
    from rlx.serve.model import ServedModel

NO_CALLS = ToolChoice("none")


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
    parser: Callable[[], Parser] | None = None
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
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    parallel: bool,
    variables: dict[str, Any],
    *,
    continues: bool,
    splits: bool,
) -> ChatPrompt:
    """See `ServedModel.chat_prompt`."""
    tokenizer, variables = model.tokenizer, checked_variables(variables)
    checked = checked_messages(messages)
    known = checked_tools(tools or ())
    choice = checked_choice(tool_choice, known)
    offered = list(tools) if tools and choice.mode != "none" else None
    last = last_answer(checked) if continues else None
    model.check_length(_texts(checked), "messages")
    checked = merged_system(load_images(checked, model.media, model.runner.supports_multimodal))

    def check(text: str) -> None:
        model.check_length([text], "messages")

    prompt = model.runner.chat_ids(checked[:-1] if last else checked, offered, check=check, **variables)
    tags = ThinkingTags.of(tokenizer)
    ids = list(prompt.ids if isinstance(prompt, Prompt) else prompt)
    thinks = tags is not None and tags.is_open(tokenizer, ids)
    if last is not None:
        prompt, thinks = _continued(model, prompt, last, tags if thinks else None), False
    context = model.checked(prompt, "messages")
    kept = kept_ids(tokenizer, tags, None)
    if not splits or last is not None:
        tags = None
    tool_format = ToolFormat.of(tokenizer) if offered else None
    found = partial(
        ChatPrompt, context, tags=tags, thinks=thinks, choice=choice, parallel=parallel, begins=not continues
    )
    if tags is None and tool_format is None:
        return found(keep_ids=frozenset() if splits else kept)
    callable_tools = known if offered else ()
    return found(
        parser=partial(AnswerParser, tags, thinks, tool_format, callable_tools),
        keep_ids=kept | kept_ids(tokenizer, None, tool_format),
        tool_format=tool_format,
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
        return Prompt([*prompt.ids, *more], prompt.images, prompt.audio)
    return [*prompt, *more]
