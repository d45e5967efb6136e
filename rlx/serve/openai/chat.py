"""/v1/chat/completions: the answer to a conversation. Server stage, one of OpenAI's paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.serve.custom_tools import reading_inputs
from rlx.serve.errors import invalid
from rlx.serve.generation import Choice, Collected, GenerationSpec
from rlx.serve.http import new_router
from rlx.serve.model import in_thread
from rlx.serve.openai.bodies import ChatBody
from rlx.serve.openai.chat_stream import ChatChunks
from rlx.serve.openai.common import Call, json_response, logprob_dicts, timings_dict, usage_dict
from rlx.serve.openai.native_output import verbose
from rlx.serve.openai.sampling import most_tokens
from rlx.serve.openai.structured import grammar_of, named_grammar
from rlx.serve.openai.tools import Offered, offered
from rlx.serve.pieces import stream_of
from rlx.serve.reasoning import effort_variables, switch_variables
from rlx.serve.streaming import Stream, while_connected

if TYPE_CHECKING:
    from rlx.serve.app import Server
    from rlx.serve.chat_prompt import ChatPrompt
    from rlx.serve.model import ServedModel


def router(server: Server) -> APIRouter:
    """`POST /chat/completions`, and the number of tokens that it would read."""
    found = new_router(tags=["chat"])

    @found.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        """The model's answer to a conversation."""
        model = server.named(body.model)
        call = Call(server, request, body, model, "chatcmpl", "chat.completion")
        tools = await in_thread(lambda: offered(body))
        prompt = await prompt_of(model, body, tools)
        spec = await spec_of(call, body, prompt)
        if not body.stream:
            with named_grammar(body):
                answer = await while_connected(request, model.collect(spec))
            whole = complete(call, body, answer, prompt, tools)
            return json_response(whole | verbose(call, body, [spec], answer))
        chunks = ChatChunks(call, body, spec, prompt.context.ids, tools)
        with named_grammar(body):
            return Stream(stream_of(await model.generate(spec), chunks, call.ping_seconds))

    @found.post("/chat/completions/input_tokens")
    async def input_tokens(body: ChatBody) -> dict[str, Any]:
        """The number of tokens of a conversation, in llama-server's form."""
        prompt = await prompt_of(server.named(body.model), body, await in_thread(lambda: offered(body)))
        return {"object": "response.input_tokens", "input_tokens": len(prompt.context)}

    return found


async def prompt_of(model: ServedModel, body: ChatBody, tools: Offered) -> ChatPrompt:
    """The prompt of a body.

    Args:
        tools: those of the body.

    Raises:
        ApiError, RlxError: as `ServedModel.chat_prompt`; or fields contradict each other.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        what = "it cannot be together with add_generation_prompt"
        raise invalid("continue_final_message", what, "set only one of them")
    variables = {
        **(body.chat_template_kwargs or {}),
        **effort_variables(model.tokenizer, body.reasoning_effort, "reasoning_effort"),
        **switch_variables(model.tokenizer, body.enable_thinking, "enable_thinking"),
    }
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.add_generation_prompt is not None and not continues:
        variables["add_generation_prompt"] = body.add_generation_prompt
    found = await model.chat_prompt(
        body.messages,
        tools.tools,
        tools.choice,
        body.parallel_tool_calls is not False and not tools.legacy,
        variables,
        continues,
        splits=body.reasoning_format != "none" and body.separate_reasoning is not False,
    )
    return reading_inputs(found, tools.custom)


async def spec_of(call: Call, body: ChatBody, prompt: ChatPrompt) -> GenerationSpec:
    """What is to be generated.

    Raises:
        ApiError: a value is out of its range, or fields contradict each other.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "it needs logprobs", "set logprobs to true")
    limits = (("max_completion_tokens", body.max_completion_tokens), ("max_tokens", body.max_tokens))
    return GenerationSpec(
        prompt.context,
        most_tokens(*limits, ("n_predict", body.n_predict), at_least=body.min_tokens),
        keep_ids=call.kept(prompt.keep_ids),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await grammar_of(call.model, body, prompt),
        parser=prompt.parser,
        **await in_thread(call.spec_fields),
    )


def complete(call: Call, body: ChatBody, answer: Collected, prompt: ChatPrompt, tools: Offered) -> dict[str, Any]:
    """The answer in one piece."""
    ids = {"prompt_token_ids": prompt.context.ids} if body.return_token_ids else {}
    return {
        **call.head("chat.completion"),
        "choices": [_choice(choice, body, tools) for choice in answer.choices],
        "usage": usage_dict(answer.usage),
        **ids,
        "timings": timings_dict(answer.timings),
    }


def _choice(choice: Choice, body: ChatBody, tools: Offered) -> dict[str, Any]:
    found = {
        "index": choice.index,
        "message": message(choice, tools, body.include_reasoning is not False),
        "logprobs": None,
        "finish_reason": tools.reason if choice.finish_reason == "tool_calls" else choice.finish_reason,
        "stop_reason": choice.stop,
    }
    if body.logprobs:
        entries = logprob_dicts(choice.logprobs, bool(body.return_tokens_as_token_ids))
        found["logprobs"] = {"content": entries, "refusal": None}
    if body.return_token_ids:
        found["token_ids"] = choice.tokens
    return found


def message(choice: Choice, tools: Offered, with_reasoning: bool = True) -> dict[str, Any]:
    """The assistant's message."""
    found: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.thinking and with_reasoning:
        found["reasoning_content"] = choice.thinking
    if choice.tool_calls:
        found["content"] = choice.text or None
        calls = [tools.call_json(call) for call in choice.tool_calls]
        found |= {"function_call": calls[0]["function"]} if tools.legacy else {"tool_calls": calls}
    return found
