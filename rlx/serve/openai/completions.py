"""/v1/completions: the continuation of texts. Server stage, one of OpenAI's paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from rlx.engine.request.output import candidate
from rlx.runners import TokenLogprob
from rlx.serve.errors import invalid
from rlx.serve.generation import Choice, Collected, GenerationSpec, TokenInfo
from rlx.serve.http import new_router
from rlx.serve.model import in_thread
from rlx.serve.openai.bodies import CompletionBody, MediaPrompt
from rlx.serve.openai.common import Call, json_response, timings_dict, usage_dict
from rlx.serve.openai.completion_stream import CompletionChunks
from rlx.serve.openai.logprobs import Logprobs
from rlx.serve.openai.native_output import verbose
from rlx.serve.openai.prompts import filled_in, media_prompt, prompt_ids, prompts
from rlx.serve.openai.sampling import most_tokens
from rlx.serve.openai.structured import grammar_of, named_grammar
from rlx.serve.pieces import stream_of
from rlx.serve.streaming import Stream, while_connected

if TYPE_CHECKING:
    from rlx.engine.request.context import Context
    from rlx.serve.app import Server
    from rlx.serve.model import ServedModel

MAX_TOKENS = 16  # OpenAI's default for this path
MAX_CHOICES = 2048  # of all prompts of a request


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with.

    Attributes:
        text: the prompt.
        infos: its tokens with their log-probabilities, NaN for the first one. Empty if none are asked for.
    """

    text: str = ""
    infos: tuple[TokenInfo, ...] = ()


def router(server: Server) -> APIRouter:
    """`POST /completions`."""
    found = new_router(tags=["completions"])

    @found.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The continuation of texts."""
        if body.response_fields:
            raise invalid("response_fields", "this path does not have it", "use /completion")
        model = server.named(body.model)
        call = Call(server, request, body, model, "cmpl", "text_completion")
        specs = await specs_of(call, body)
        echoes = await while_connected(request, echoes_of(model, body, specs))
        if not body.stream:
            with named_grammar(body):
                answer = await while_connected(request, model.collect(*specs))
            return json_response(complete(call, body, answer, echoes) | verbose(call, body, specs, answer))
        chunks = CompletionChunks(call, body, specs, echoes)
        with named_grammar(body):
            return Stream(stream_of(await model.generate(*specs), chunks, call.ping_seconds))

    return found


async def specs_of(call: Call, body: CompletionBody, default: int | None = MAX_TOKENS) -> list[GenerationSpec]:
    """What is to be generated, for each prompt.

    Args:
        default: maximum number of tokens where the body has none; None for no limit.

    Raises:
        ApiError: a value is out of its range, or fields contradict each other.
    """
    n, best = body.n or 1, body.best_of or body.n or 1
    if best < n:
        raise invalid("best_of", f"it is {best}, less than the {n} of n")
    if best > n and body.stream:
        raise invalid("best_of", "the best answers are known at the end only", "leave stream out")
    fields = await in_thread(call.spec_fields) | {"n": best, "grammar": await grammar_of(call.model, body)}
    logprobs = body.n_probs if body.logprobs is None else body.logprobs
    if logprobs is None and best > n:
        logprobs = 0
    limit = default
    if (body.max_tokens, body.n_predict) != (None, None):
        limits = (("max_tokens", body.max_tokens), ("n_predict", body.n_predict))
        limit = most_tokens(*limits, at_least=body.min_tokens, least=0)
    elif default is not None and (body.min_tokens or 0) > default:
        raise invalid("min_tokens", f"it is {body.min_tokens}, more than {default}, the default of max_tokens")
    found = await in_thread(lambda: _prompts(call.model, body))
    if len(found) * best > MAX_CHOICES:
        raise invalid("prompt", f"{len(found)} prompts with {best} answers each, at most {MAX_CHOICES} are computed")
    return [
        GenerationSpec(
            prompt, limit, keep_ids=call.kept(frozenset()), top_logprobs=logprobs, **fields
        )
        for prompt in found
    ]  # fmt: skip


def _prompts(model: ServedModel, body: CompletionBody) -> list[Context]:
    found = prompts(body.prompt, "prompt")
    if body.suffix:
        if len(found) != 1 or not isinstance(found[0], str):
            raise invalid("suffix", "it needs a prompt that is one text")
        return [model.checked(filled_in(model, found[0], body.suffix))]
    adds = body.add_special_tokens is not False
    names = ["prompt"] if len(found) == 1 else [f"prompt[{i}]" for i in range(len(found))]
    return [
        model.checked(
            media_prompt(model, each, name, adds)
            if isinstance(each, MediaPrompt)
            else prompt_ids(model, each, name, adds)
        )
        for each, name in zip(found, names, strict=True)
    ]


async def echoes_of(model: ServedModel, body: CompletionBody, specs: list[GenerationSpec]) -> list[Echo]:
    """The beginnings of the answers to each prompt."""
    if not body.echo:
        return [Echo()] * len(specs)
    return [await in_thread(lambda given=given, spec=spec: _echo(model, given, spec))  # type: ignore[misc]
            for given, spec in zip(prompts(body.prompt, "prompt"), specs, strict=True)]  # fmt: skip


def _echo(model: ServedModel, given: Any, spec: GenerationSpec) -> Echo:
    context = model.checked(spec.prompt)
    text = given if isinstance(given, str) else model.tokenizer.decode(context.ids)
    if spec.top_logprobs is None:
        return Echo(text)
    steps = model.runner.score_steps(context, spec.top_logprobs)
    infos = [
        TokenInfo(candidate(model.tokenizer, step.token, step.logprob or 0.0), step.top_logprobs) for step in steps
    ]
    first = candidate(model.tokenizer, context.ids[0], 0.0)
    return Echo(text, (TokenInfo(TokenLogprob(first.token, first.text, float("nan"), first.bytes)), *infos))


def complete(call: Call, body: CompletionBody, answer: Collected, echoes: list[Echo]) -> dict[str, Any]:
    """The answer in one piece."""
    n, best = body.n or 1, body.best_of or body.n or 1
    kept = [choice for i in range(len(echoes)) for choice in _best(answer.choices[i * best : (i + 1) * best], n)]
    return {
        **call.head("text_completion"),
        "choices": [_choice(choice, i, body, echoes[i // n]) for i, choice in enumerate(kept)],
        "usage": usage_dict(answer.usage),
        "timings": timings_dict(answer.timings),
    }


def _best(choices: list[Choice], n: int) -> list[Choice]:
    """The `n` choices with the highest mean log-probability."""

    def mean(choice: Choice) -> float:
        return sum(info.chosen.logprob for info in choice.logprobs) / max(1, len(choice.logprobs))

    return choices if len(choices) == n else sorted(choices, key=mean, reverse=True)[:n]


def _choice(choice: Choice, index: int, body: CompletionBody, echo: Echo) -> dict[str, Any]:
    found = {
        "index": index,
        "text": echo.text + choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop,
    }
    if (body.logprobs, body.n_probs) != (None, None):
        found["logprobs"] = Logprobs(bool(body.return_tokens_as_token_ids)).of([*echo.infos, *choice.logprobs])
    if body.return_token_ids or body.return_tokens:
        found["token_ids"] = choice.tokens
    return found
