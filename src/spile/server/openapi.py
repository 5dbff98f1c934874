"""Describes the API as OpenAPI 3.1 does, from the very types that requests are checked by.

It does not know how anything is answered. What a type cannot say (that a prompt fits the context, that a token id
is one of the model's) is a 400 all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spile import __version__
from spile.server.wire import (
    ALIASES,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    MemoryBody,
    TokenizeBody,
)

_BODIES = {
    "ChatBody": ChatBody,
    "CompletionBody": CompletionBody,
    "TokenizeBody": TokenizeBody,
    "DetokenizeBody": DetokenizeBody,
    "MemoryBody": MemoryBody,
}
_REFERENCE = "#/components/schemas/{name}"
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER_OR_NULL = {"type": ["number", "null"]}
# Of a stream: `data` is a chunk's JSON, or the JSON of an error, or at the end [DONE].
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
_STATUS_COUNTS = (
    "running",
    "waiting",
    "memory_bytes",
    "peak_memory_bytes",
    "resident_expert_bytes",
    "bytes_read",
    "hits",
    "misses",
)
_TEXT_OR_NULL = {"type": ["string", "null"]}


def description(model_ids: Sequence[str], *, needs_key: bool = False) -> dict[str, Any]:
    """Return the document of a server that answers to these names."""
    schemas = {**_request_schemas(model_ids), **_response_schemas()}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "spile",
            "version": __version__,
            "description": "OpenAI's chat and text completions for one model, and what it takes to answer.",
        },
        "paths": _paths(),
        "components": {"schemas": schemas},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"header": []}]
    return document


def _paths() -> dict[str, Any]:
    name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/chat/completions": {
            "post": _asks("ChatBody", "ChatCompletion", "Answer messages.", streams=True)
        },
        "/v1/completions": {
            "post": _asks("CompletionBody", "Completion", "Go on from a text.", streams=True)
        },
        "/v1/models": {"get": _gives("ModelList", "List the model.")},
        "/v1/models/{model_id}": {
            "get": _gives("Model", "Describe the model.", "404") | {"parameters": [name]}
        },
        "/tokenize": {"post": _asks("TokenizeBody", "Tokens", "Turn a text or messages into token ids.")},
        "/detokenize": {"post": _asks("DetokenizeBody", "Detokenized", "Turn token ids into text.")},
        "/memory": {"post": _asks("MemoryBody", "Memory", "Keep to another budget; needs a key.")},
        "/health": {"get": _gives("Health", "Say whether requests are answered.") | {"security": []}},
        "/status": {"get": _gives("Status", "Say how things are now.")},
        "/metrics": {
            "get": {
                "summary": "Counters for Prometheus.",
                "responses": {
                    "200": {
                        "description": "Text format 0.0.4.",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    },
                    **_failures(()),
                },
            }
        },
    }


def _asks(body: str, reply: str, summary: str, *, streams: bool = False) -> dict[str, Any]:
    found = _gives(reply, summary, "400", "404", "408", "413", "429", "500")
    if streams:
        content = found["responses"]["200"]["content"]
        content["text/event-stream"] = {"schema": _EVENT}
    return {**found, "requestBody": {"required": True, "content": _json(body)}}


def _gives(reply: str, summary: str, *failures: str) -> dict[str, Any]:
    done = {"200": {"description": "Done.", "content": _json(reply)}}
    if reply == "Health":
        done["503"] = {"description": "Not now.", "content": _json(reply)}
    return {"summary": summary, "responses": {**_failures(failures), **done}}


def _failures(statuses: Sequence[str]) -> dict[str, Any]:
    what = {
        "400": "The request cannot be answered as it is.",
        "401": "The API key is missing or wrong.",
        "403": "Requests from there are not allowed.",
        "404": "There is no such model.",
        "408": "The body did not come in time.",
        "413": "The body is too large.",
        "429": "The queue is full; Retry-After says when to try again.",
        "500": "The server failed; its log says why.",
        "503": "The model is not there: it is loading, has failed, or the server is ending.",
    }
    chosen = ("401", "403", *statuses, "503")
    return {status: {"description": what[status], "content": _json("Error")} for status in chosen}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=name)}}}


def _request_schemas(model_ids: Sequence[str]) -> dict[str, Any]:
    """Return the schemas of the bodies' types, and add what those types leave to `protocol.py`."""
    _, schemas = msgspec.json.schema_components(_BODIES.values(), ref_template=_REFERENCE)
    for name in ("ChatBody", "CompletionBody"):
        properties = schemas[name]["properties"]
        properties |= {alias: properties[ours] for alias, ours in ALIASES.items() if ours in properties}
        properties["n_predict"] = {"anyOf": [properties["n_predict"], {"const": -1}]}
        for field, neutral in NEUTRAL.items():
            values = {} if neutral is None else {"enum": [*neutral, None]}
            properties[field] = {"description": "Accepted; has no effect.", **values}
    for name in _BODIES:
        schemas[name]["properties"]["model"] = {"enum": [*model_ids, None], "default": None}
    texts, ids = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    prompts = [texts, ids, {"type": "array", "items": ids, "minItems": 1}]
    schemas["CompletionBody"]["properties"]["prompt"] = {
        "anyOf": [
            texts,
            *({"type": "array", "items": one, "minItems": 1, "maxItems": 128} for one in prompts),
        ]
    }
    null = {"type": "null"}
    tokenize = schemas["TokenizeBody"]
    of_messages = (
        *("tools", "chat_template_kwargs", "enable_thinking"),
        *("add_generation_prompt", "continue_final_message"),
    )
    tokenize["anyOf"] = [
        {
            "required": ["prompt"],
            "properties": {"prompt": {"type": "string"}, **dict.fromkeys(("messages", *of_messages), null)},
        },
        {
            "required": ["messages"],
            "properties": {
                "messages": {"type": "array"},
                **dict.fromkeys(("prompt", "add_special_tokens"), null),
            },
        },
    ]
    return schemas


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _response_schemas() -> dict[str, Any]:
    error = _object({"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT_OR_NULL})
    error["properties"]["code"] = _TEXT_OR_NULL
    took: dict[str, Any] = dict.fromkeys(
        ("bytes_read", "hits", "misses", "cached_tokens", "memory_bytes"), _COUNT
    )
    took |= {name: {"type": "number"} for name in ("stall_seconds", "compute_seconds")}
    took |= dict.fromkeys(
        ("hit_rate", "prompt_tokens_per_second", "tokens_per_second", "time_to_first_token_seconds"),
        _NUMBER_OR_NULL,
    )
    took["not_enforced"] = _array({"type": "string"})  # of the form that was asked for
    took |= {"exact": {"type": "boolean"}, "engine": {"type": "string"}, "peak_memory_bytes": _COUNT}
    usage = _object(
        {
            **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
            "spile": _object(took),
        }
    )
    call = _object(
        {
            "id": {"type": "string"},
            "type": {"const": "function"},
            "function": _object({"name": {"type": "string"}, "arguments": {"type": "string"}}),
        }
    )
    message = _object(
        {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL},
        reasoning_content={"type": "string"},
        reasoning={"type": "string"},
        refusal={"type": "null"},
        tool_calls=_array(call),
    )
    reason = {"enum": ["stop", "length", "tool_calls"]}
    logprobs = {"type": ["object", "null"]}
    choice = _object({"index": _COUNT, "message": message, "finish_reason": reason, "logprobs": logprobs})
    text = _object(
        {"index": _COUNT, "text": {"type": "string"}, "finish_reason": reason, "logprobs": logprobs}
    )
    envelope = {"id": {"type": "string"}, "created": _COUNT, "model": {"type": "string"}, "usage": usage}
    model = _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": {"type": "string"},
        }
    )
    phase = {"enum": ["loading", "ok", "failing", "failed", "stopping"]}
    return {
        "Error": _object({"error": error}),
        "Usage": usage,
        "ChatCompletion": _object(
            {**envelope, "object": {"const": "chat.completion"}, "choices": _array(choice)}
        ),
        "Completion": _object({**envelope, "object": {"const": "text_completion"}, "choices": _array(text)}),
        "Model": model,
        "ModelList": _object({"object": {"const": "list"}, "data": _array(model)}),
        "Tokens": _object({"tokens": _array(_COUNT), "count": _COUNT, "max_model_len": _COUNT}),
        "Detokenized": _object({"prompt": {"type": "string"}}),
        "Memory": _object({"budget_bytes": _COUNT, "summary": {"type": "string"}}),
        "Health": _object({"status": phase}),
        "Status": _object(
            {
                "status": phase,
                "model": {"type": "string"},
                **dict.fromkeys(_STATUS_COUNTS, _COUNT),
                "hit_rate": _NUMBER_OR_NULL,
                "tokens_per_second": _NUMBER_OR_NULL,
                "requests": _array({"type": "object"}),
            }
        ),
    }
