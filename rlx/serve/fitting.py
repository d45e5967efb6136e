"""Conversations that are too long: the oldest turns go, as in Ollama and with `truncation` of OpenAI's Responses.

Server stage, below the APIs. What is kept begins with a message of the user, so that every chat template takes it.
Messages of the system stay, and so does the last message of the user with what follows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlx.serve import record
from rlx.serve.chat_prompt import ChatPrompt
from rlx.serve.errors import OVERFLOW, ApiError

JsonObject = dict[str, Any]
ROOM = 4  # the part of the context that is left to the answer: a fourth

Make = Callable[[list[JsonObject]], Awaitable[ChatPrompt]]


async def fitting_prompt(
    messages: Sequence[JsonObject], make: Make, context: int, answer: int | None, *, cuts: bool
) -> ChatPrompt:
    """The prompt of a conversation, without its oldest turns if it is too long.

    The header `X-Rlx-Ignored` then names the messages that it lacks, as in `messages[0..6]`.

    Args:
        make: makes the prompt of messages; `ApiError` if they are too long for the context.
        context: tokens that the context holds.
        answer: tokens that the answer may have, which a prompt that is cut leaves room for; None for no limit.
        cuts: whether turns may go.

    Raises:
        ApiError: even the last turn is too long, or turns may not go.
    """
    try:
        return await make(list(messages))
    except ApiError as error:
        starts = [i for i, each in enumerate(messages) if each["role"] == "user"][1:]
        if error.code != OVERFLOW or not cuts or not starts:
            raise
    room = min(context // ROOM, context if answer is None else answer)
    low, high = 0, len(starts) - 1
    while low < high:  # every prompt takes a template, so only a few of them are made
        at = (low + high) // 2
        fits = await _fits(make, _kept(messages, starts[at]), context - room)
        low, high = (low, at) if fits else (at + 1, high)
    prompt = await make(_kept(messages, starts[low]))
    record.ignore(f"messages[{_first(messages)}..{starts[low] - 1}]")
    return prompt


async def _fits(make: Make, messages: list[JsonObject], most: int) -> bool:
    """Whether the prompt of messages has at most so many tokens."""
    try:
        return len((await make(messages)).context) <= most
    except ApiError as error:
        if error.code != OVERFLOW:
            raise
        return False


def _kept(messages: Sequence[JsonObject], start: int) -> list[JsonObject]:
    return [each for i, each in enumerate(messages) if i >= start or each["role"] == "system"]


def _first(messages: Sequence[JsonObject]) -> int:
    """The first message that is not the system's."""
    return next(i for i, each in enumerate(messages) if each["role"] != "system")
