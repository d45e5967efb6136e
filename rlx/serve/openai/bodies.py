"""The bodies of OpenAI's paths, with the fields of vLLM and llama-server that rlx has something for.

Server stage. A field stands here with the type that is sent; what it means is in `fields.py` and the
modules of the paths.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlx.serve.http import (
    MAX_BIASES,
    MAX_BREAKERS,
    MAX_CHOICES,
    MAX_ID,
    MAX_MESSAGES,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOOLS,
    Anyway,
    AtMost,
    Body,
    hint,
    hints,
    unsupported,
)  # fmt: skip

Count = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=-1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(ge=0)]
Text = str | None
Pair = Annotated[list[int | float | str | bool], Field(min_length=2, max_length=2)]
Bias = Annotated[dict[str, float | Literal[False]] | list[Pair], AtMost(MAX_BIASES)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)]
Stop = Annotated[str, Field(min_length=1)]  # an empty one would end every answer at once
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Penalty = Annotated[float, Field(ge=0.01, le=100)]  # a factor: far from 1, logits overflow
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


@unsupported("structural_tag whitespace_pattern", disable_additional_properties=[False], disable_fallback=[True, False])
class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: Text = None
    choice: list[str] | None = None
    grammar: Text = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


@hints(include_obfuscation=[False])
class StreamOptions(Body):
    """The fields about what a stream says besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """How tokens are chosen, by the names of OpenAI, vLLM and llama-server; Ollama has them, too."""

    temperature: Positive | None = None
    top_p: Share | None = None
    top_k: Limit | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Limit | None = None
    dry_multiplier: Positive | None = None
    dry_base: Annotated[float, Field(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1)] | None = None
    dry_penalty_last_n: Limit | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=MAX_BREAKERS)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: Positive | None = None
    mirostat_eta: Positive | None = None


@hints(
    "user metadata safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options prediction "
    "session_id",
    store=[False], service_tier=["auto", "default"],
)  # fmt: skip
@unsupported(
    "samplers allowed_token_ids repetition_detection guided_whitespace_pattern stop_regex truncate_prompt_tokens "
    "truncation_side logprob_token_ids kv_transfer_params",
    dynatemp_range=[0, 0.0], dynatemp_exponent=[1, 1.0], min_keep=[0], length_penalty=[1, 1.0],
    use_beam_search=[False], bad_words=[[]], logits_processors=[[]], vllm_xargs=[{}], lora=[[]],
    t_max_predict_ms=[-1, 0], guided_decoding_backend=["auto", "guidance"], spaces_between_special_tokens=[True],
    prompt_logprobs=[0], stream_interval=[1], post_sampling_probs=[False],
)  # fmt: skip
class CommonFields(SamplingFields):
    """The fields that chat and completions share."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None

    # what ends an answer
    max_tokens: Limit | None = None
    n_predict: Limit | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    # the form that an answer must have
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Text = None
    guided_choice: list[str] | None = None
    guided_grammar: Text = None
    grammar: Text = None
    json_schema: dict[str, Any] | str | bool | None = None
    regex: Text = None
    ebnf: Text = None

    # what is asked for besides, and how it is answered
    model: Text = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    request_id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: Annotated[float, Field(gt=0)] | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Text = None

    cache_prompt: bool | None = None
    verbose: bool | None = None
    id_slot: Annotated[int | None, hint(-1)] = None
    n_keep: Annotated[int | None, hint()] = None  # of a context that is cut: none ever is
    n_discard: Annotated[int | None, hint(0)] = None
    n_cache_reuse: Annotated[int | None, hint(0)] = None
    backend_sampling: Annotated[bool | None, hint(False)] = None
    return_tokens: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@hints("audio web_search_options", verbosity=["medium"])  # audio: its form, which `modalities` asks for
@unsupported(
    "moderation chat_template thinking_token_budget",
    modalities=[["text"]], echo=[False], add_special_tokens=[False], mm_processor_kwargs=[{}],
    thinking_budget_tokens=[-1], thinking_forced_open=[False], parse_tool_calls=[True], n_probs=[0],
    response_fields=[[]],
)  # fmt: skip
class ChatBody(CommonFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Tools | None = None
    function_call: Literal["none", "auto"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class MediaPrompt(Body):
    """llama-server's prompt with images: `<__media__>` in the text stands for each."""

    prompt_string: str
    multimodal_data: list[str] | None = None


@unsupported("prompt_embeds")
class CompletionBody(CommonFields):
    """The body of `/v1/completions`."""

    prompt: str | MediaPrompt | list[str | int | list[int | str] | MediaPrompt]
    suffix: Text = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None
    n_probs: TopLogprobs | None = None
    response_fields: list[str] | None = None


class Extra(Body):
    """A file, or a part of one, that an editor sends besides."""

    text: str
    filename: str = ""
    time: Anyway = None


@hints("samplers t_max_prompt_ms", t_max_predict_ms=[-1, 0])
class InfillBody(CompletionBody):
    """The body of llama-server's `/infill`, as editors send it: what they ask of the sampling is a hint."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Extra], Field(max_length=MAX_MESSAGES)] | None = None

    n_indent: Annotated[int | None, hint(0)] = None


@hints("user priority")
@unsupported("truncate_prompt_tokens", embd_normalize=[2])
class EmbeddingBody(Body):
    """The body of `/v1/embeddings`."""

    input: str | list[str | int | list[int | str]]
    model: Text = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    pooling: Literal["mean", "last", "cls", "max"] | None = None
    normalize: bool | None = None
