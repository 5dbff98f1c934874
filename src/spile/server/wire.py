"""What a request's JSON may hold: one frozen type a body. `openapi.py` describes these very types.

It does not know what a request means; `protocol.py` says that. A parameter that is not here is refused by name;
so is one whose type is `None`, which clients may send as null. What is accepted and has no effect on an answer
is marked so. What neighbours call otherwise, or have besides, is in two tables.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=16)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Part = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
Bias = dict[Annotated[str, Meta(pattern=r"^[0-9]{1,9}$(?!\n)")], Annotated[float, Meta(ge=-100, le=100)]]
Filled = Annotated[str, Meta(min_length=1)]
Stops = Filled | Annotated[list[Filled], Meta(max_length=16)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Off = Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})]  # where on is not supported
# Accepted, without effect on an answer.
Label = Annotated[str | None, Meta(description="Accepted; has no effect.")]
Labels = Annotated[dict[str, Any] | None, Meta(description="Accepted; has no effect.")]
Tier = Annotated[Literal["auto", "default"] | None, Meta(description="Accepted; has no effect.")]


Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # of tokens; -1 is none
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# What neighbours call what is here: by whichever name, it is given once.
ALIASES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "thinking_budget_tokens": "thinking_budget",
    "thinking_token_budget": "thinking_budget",
}
# Neighbours' fields that can be sent with these values, of which each changes nothing here. Any other is refused by
# name; `None` stands for any value at all.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "best_of": (1,),
    "cache_prompt": None,
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "priority": None,
    "repeat_last_n": (-1,),
    "request_id": None,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: one more chunk, the last, says what the answer took; `continuous_usage_stats`: each chunk says
    what it took so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, Meta(description="Accepted; has no effect.")] = None


class ContentPart(Struct, frozen=True):
    """A piece of a message. The model reads only text."""

    text: str
    type: Literal["text", "input_text", "output_text"]


class Message(Struct, frozen=True):
    """One turn. More fields are handed to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart | str] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class FunctionTool(Struct, frozen=True):
    """What a tool's function is called; all of it goes to the chat template."""

    name: Filled
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, frozen=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Struct, frozen=True):
    name: Filled


class ToolChoice(Struct, frozen=True, tag="function"):
    """The one tool that has to be called."""

    function: FunctionName


class AllowedTool(Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True):
    """The tools that may be called, of those that there are."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class ToolsChoice(Struct, frozen=True, tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: AllowedTools


class JsonSchema(Struct, frozen=True):
    """A schema that the answer keeps to."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer has to be. `json_schema`, `pattern`, `choices` and `grammar` go with the type of that name."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: Filled | None = None  # of regex
    choices: Annotated[list[Filled], Meta(min_length=1, max_length=1000)] | None = None
    grammar: Filled | None = None  # GBNF or Lark


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's word for `response_format`: one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Filled | None = None
    choice: Annotated[list[Filled], Meta(min_length=1, max_length=1000)] | None = None
    grammar: Filled | None = None


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    """How much a reasoning model may think."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    stop: Stops | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Part | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1 are off
    min_p: Part | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Filled | None = None
    guided_choice: Annotated[list[Filled], Meta(min_length=1, max_length=1000)] | None = None
    guided_grammar: Filled | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    user: Label = None
    metadata: Labels = None


class ChatBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/chat/completions. `max_completion_tokens` wins over `max_tokens`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | ToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    store: Annotated[bool | None, Meta(description="Accepted; has no effect: nothing is kept.")] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    service_tier: Tier = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    prediction: None = None
    web_search_options: None = None


class CompletionBody(Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/completions: `prompt` is gone on from as it is, without a chat template."""

    prompt: (
        Filled
        | Annotated[
            list[Filled | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
    )
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: None = None


class TokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of /tokenize: a text, or messages as for chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class MemoryBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /memory: another budget for the whole process."""

    memory: Filled | Annotated[int, Meta(ge=1, le=2**62)]


class DetokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
