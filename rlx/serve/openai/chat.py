"""/v1/chat/completions: the answer to a conversation. Server stage, one of OpenAI's paths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, Request, Response

from rlx.json_file import JsonObject
from rlx.serve.answers import Asked, Choice, Delta, End, Finished, Progress, answered
from rlx.serve.custom_tools import as_function
from rlx.serve.errors import invalid
from rlx.serve.fields import check_tool, most_tokens, named_grammar, text_grammar
from rlx.serve.http import event, in_thread, new_router, shown
from rlx.serve.openai.bodies import ChatBody
from rlx.serve.openai.completions import (
    OpenAIWriter,
    asked_fields,
    logprob_dicts,
    progress_dict,
    timings_dict,
    usage_dict,
    verbose,
)
from rlx.serve.prompts import (
    ChatPrompt,
    chat_prompt,
    checked_messages,
    effort_variables,
    grammar_maker,
    switch_variables,
)

if TYPE_CHECKING:
    from rlx.serve.model import ServedModel
    from rlx.serve.server import Server
    from rlx.text.tool_calls import ToolCallDelta


def router(server: Server) -> APIRouter:
    """`POST /chat/completions`, and the number of tokens that it would read."""
    found = new_router(tags=["chat"])

    @found.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        model = server.named(body.model)
        with named_grammar(body):
            return await answered(server, request, model, lambda: _writer(model, body), body.stream)

    @found.post("/chat/completions/input_tokens")
    async def input_tokens(body: ChatBody) -> dict[str, Any]:
        """The number of tokens of a conversation, in llama-server's form."""
        model = server.named(body.model)
        prompt = await in_thread(lambda: prompt_of(model, body, offered(body)))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.context)}

    return found


def prompt_of(model: ServedModel, body: ChatBody, tools: Offered) -> ChatPrompt:
    """The prompt of a body.

    Args:
        tools: those of the body.

    Raises:
        ApiError, RlxError: as `chat_prompt`; or fields contradict each other.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        what = "it cannot be together with add_generation_prompt"
        raise invalid("continue_final_message", what, "set only one of them")
    variables = {
        **(body.chat_template_kwargs or {}),
        **effort_variables(model, body.reasoning_effort, "reasoning_effort"),
        **switch_variables(model, body.enable_thinking, "enable_thinking"),
    }
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.add_generation_prompt is not None and not continues:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return chat_prompt(
        model,
        checked_messages(body.messages),
        tools.tools,
        tools.choice,
        body.parallel_tool_calls is not False and not tools.legacy,
        variables,
        continues,
        splits=body.reasoning_format != "none" and body.separate_reasoning is not False,
        custom=tools.custom,
    )


def _writer(model: ServedModel, body: ChatBody) -> ChatWriter:
    """The writer of the answer.

    Raises:
        ApiError, RlxError: as `prompt_of`; or a value is out of its range, or fields contradict each other.
    """
    tools = offered(body)
    prompt = prompt_of(model, body, tools)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "it needs logprobs", "set logprobs to true")
    limits = (("max_completion_tokens", body.max_completion_tokens), ("max_tokens", body.max_tokens))
    asked = model.asked(
        prompt.context,
        most_tokens(*limits, ("n_predict", body.n_predict), at_least=body.min_tokens),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        parser=prompt.parser,
        grammar=grammar_maker(model, text_grammar(body), prompt),
        **asked_fields(model, body, prompt.keep_ids),
    )
    return ChatWriter(model, body, asked, prompt.context.ids, tools)


class ChatWriter(OpenAIWriter):
    """Writes the answer to a conversation.

    Args:
        model: computes it.
        body: what is asked for.
        asked: what is to be generated.
        prompt: its token ids.
        tools: what the model may call.
    """

    body: ChatBody

    def __init__(self, model: ServedModel, body: ChatBody, asked: Asked, prompt: list[int], tools: Offered) -> None:
        text = b',"delta":{"content":', b"}"
        super().__init__(model, body, [asked], "chatcmpl", "chat.completion.chunk", text)
        self._ids, self._tools = prompt, tools
        self._custom = set[tuple[int, int]]()  # the calls of custom tools, by choice and number
        self._counts = bool(body.stream_options and body.stream_options.continuous_usage_stats)
        self._reasons, self._logs = body.include_reasoning is not False, bool(body.logprobs)
        self._is_plain = not (self._logs or self._counts or body.return_token_ids or body.timings_per_token)
        self._tokens, self._began = 0, time.perf_counter()
        self._prompt, self._final = Progress(0, 0, 0, 0.0), cast("Finished | None", None)

    # ---------------------------------------------------------------------------------------------- streams

    def first(self) -> bytes:
        more: dict[str, Any] = {}
        if self.body.return_token_ids:
            more["prompt_token_ids"] = self._ids
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._piece(i, delta, **more) for i in range(len(self.choices)))

    def _delta(self, delta: Delta) -> bytes:
        self._tokens += len(delta.tokens)
        if self._is_plain and delta.text and not delta.thinking and not delta.tool_calls:
            return self._starts[delta.index] + encode_basestring(delta.text).encode() + self._tail
        pieces: list[dict[str, Any]] = []
        if delta.thinking and self._reasons:
            pieces.append({"reasoning_content": delta.thinking})
        if delta.text:
            pieces.append({"content": delta.text})
        pieces += [self._calling(delta.index, each) for each in delta.tool_calls]
        if not pieces and (self._is_plain or not delta.tokens):
            return b""
        pieces = pieces or [{"content": ""}]
        return b"".join(self._piece(delta.index, each, delta if i == 0 else None) for i, each in enumerate(pieces))

    def _calling(self, index: int, call: ToolCallDelta) -> dict[str, Any]:
        """The addition of a piece of a tool call to a choice: id and name come first."""
        if call.name in self._tools.custom:
            self._custom.add((index, call.index))
        kind, text = ("custom", "input") if (index, call.index) in self._custom else ("function", "arguments")
        inner = {"name": call.name, text: call.arguments} if call.id else {text: call.arguments}
        if self._tools.legacy:
            return {"function_call": inner}
        head = {"id": call.id, "type": kind} if call.id else {}
        return {"tool_calls": [{"index": call.index, **head, kind: inner}]}

    def _piece(
        self, index: int, delta: dict[str, Any], of: Delta | None = None, end: End | None = None, **more: Any
    ) -> bytes:
        """A piece of one choice.

        Args:
            of: the tokens that it tells of.
            end: of the choice.
            more: further fields of the piece.
        """
        reason: str | None = None if end is None else end.finish_reason
        reason = self._tools.reason if reason == "tool_calls" else reason
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if of is not None and self._logs:
            choice["logprobs"] = {"content": logprob_dicts(of.logprobs, self._as_ids), "refusal": None}
        if of is not None and self.body.return_token_ids:
            choice["token_ids"] = of.tokens
        if end is not None:
            choice["stop_reason"] = end.stop
        return self._chunk([choice], more)

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        found = {**self._head, "choices": choices, **more}
        if self._counts and "usage" not in found:
            found["usage"] = usage_dict(self._numbers())
        elif self._with_usage:
            found.setdefault("usage", None)
        if self.body.timings_per_token and "timings" not in found:
            found["timings"] = timings_dict(self._numbers())
        return event(found)

    def _ended(self, end: End, more: dict[str, Any]) -> bytes:
        return self._piece(end.index, {}, end=end, **more)

    def _finish(self, finished: Finished) -> bytes:
        self._final = finished
        return super()._finish(finished)

    def _progress(self, progress: Progress) -> bytes:
        self._prompt, self._began = progress, time.perf_counter()
        if not self.body.return_progress or self._tokens:
            return b""
        return self._piece(0, {}, prompt_progress=progress_dict(progress))

    def _numbers(self) -> Finished:
        """Tokens and times up to now."""
        if self._final is not None:
            return self._final
        prompt, ms = self._prompt, 1000 * (time.perf_counter() - self._began)
        steps = max(0, self._tokens - (self.body.n or 1))
        return Finished(prompt.total, prompt.cached, self._tokens, 0, steps, 0.0, prompt.ms, ms)

    # ---------------------------------------------------------------------------------------------- in one piece

    def whole(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._ids} if self.body.return_token_ids else {}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(each) for each in self.choices],
            "usage": usage_dict(self.finished),
            **ids,
            "timings": timings_dict(self.finished),
            **verbose(self),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        found = {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": None,
            "finish_reason": self._tools.reason if choice.finish_reason == "tool_calls" else choice.finish_reason,
            "stop_reason": choice.stop,
        }
        if self._logs:
            found["logprobs"] = {"content": logprob_dicts(choice.logprobs, self._as_ids), "refusal": None}
        if self.body.return_token_ids:
            found["token_ids"] = choice.tokens
        return found

    def _message(self, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thinking and self._reasons:
            found["reasoning_content"] = choice.thinking
        if choice.tool_calls:
            found["content"] = choice.text or None
            calls = [self._tools.call_json(call) for call in choice.tool_calls]
            found |= {"function_call": calls[0]["function"]} if self._tools.legacy else {"tool_calls": calls}
        return found


@dataclass(frozen=True)
class Offered:
    """The tools that a chat offers.

    Attributes:
        tools: functions.
        choice: whether one has to be called, as `rlx.text.tool_calls.checked_choice` takes it.
        custom: names of those that stand for custom tools.
        legacy: whether the body has `functions`, and the answer `function_call`.
    """

    tools: list[JsonObject] | None = None
    choice: Any = None
    custom: frozenset[str] = frozenset()
    legacy: bool = False

    @property
    def reason(self) -> str:
        """The `finish_reason` of an answer that calls."""
        return "function_call" if self.legacy else "tool_calls"

    def call_json(self, call: ToolCallDelta) -> JsonObject:
        """A call of an answer."""
        if call.name in self.custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def offered(body: ChatBody) -> Offered:
    """The tools of a body. Compiles grammars.

    Raises:
        ApiError: a custom tool or a choice is malformed, or fields contradict each other.
    """
    if body.functions:
        if body.tools:
            raise invalid("functions", "it cannot be together with tools", "use tools")
        choice = {"type": "function", "function": body.function_call}
        named = isinstance(body.function_call, dict)
        functions = [{"type": "function", "function": each} for each in body.functions]
        for i, function in enumerate(functions):
            check_tool(function, f"functions[{i}]", "parameters")
        return Offered(functions, choice if named else body.function_call, legacy=True)
    if isinstance(body.function_call, dict):
        raise invalid("function_call", "there are no functions", "give tools and tool_choice")
    tools, custom = list[JsonObject](), set[str]()
    for i, tool in enumerate(body.tools or ()):
        if tool.get("type") == "custom":
            function = as_function(tool.get("custom"), f"tools[{i}].custom")
            custom.add(str(function["name"]))
            tool = {"type": "function", "function": function}
        tools.append(tool)
    return _chosen(tools, body.tool_choice, frozenset(custom))


def _chosen(tools: list[JsonObject], choice: Any, custom: frozenset[str]) -> Offered:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # some clients send it flat, as the Responses API has it
        tools, choice = _allowed(tools, allowed if isinstance(allowed, Mapping) else {})
    elif isinstance(choice, Mapping) and choice.get("type") == "custom":
        choice = {"type": "function", "function": choice.get("custom")}
    if not tools and choice in ("auto", "none"):
        choice = None
    return Offered(tools or None, choice, custom)


def _allowed(tools: list[JsonObject], allowed: Mapping[str, Any]) -> tuple[list[JsonObject], str]:
    """The tools that a choice leaves, and the choice among them."""
    mode, entries, where = allowed.get("mode"), allowed.get("tools"), "tool_choice.allowed_tools"
    if mode not in ("auto", "required"):
        raise invalid(f"{where}.mode", f"expected auto or required, found {shown(mode)}")
    if not isinstance(entries, list):
        raise invalid(f"{where}.tools", f"expected an array, found {shown(entries)}")
    known = {_name(tool): tool for tool in tools}
    for i, entry in enumerate(entries):
        if _name(entry) not in known:
            raise invalid(f"{where}.tools[{i}]", f"there is no tool {shown(_name(entry))}", "name one of tools")
    return [known[name] for name in dict.fromkeys(map(_name, entries))], mode


def _name(tool: Any) -> str:
    """The name in a tool, or in what refers to one."""
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function") or tool.get("custom") or tool
    return str(inner.get("name")) if isinstance(inner, Mapping) else ""
