"""Turns the chunks of a model's answers into what OpenAI's clients expect, streamed or whole.

It does not know how answers are made or sent. A whole answer is the streamed one joined, so the two say the same.
Beyond OpenAI's: `reasoning_content` (and the same as `reasoning`) beside `content`, and in `usage` an object
`spile` with what the answer took.
"""

from __future__ import annotations

import math
import secrets
import time
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Any

from spile.generation.generate import Stats
from spile.generation.logprobs import Logprob
from spile.memory import current_memory_bytes
from spile.server.protocol import Request
from spile.server.tasks import Said, Task
from spile.server.tools import Arguments, CallBegun, Delta, Text, ToolCallParser

_LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has not; OpenAI's value


class Answer:
    """One choice: what came of it so far, and what each event adds."""

    def __init__(self, request: Request, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stats: Stats | None = None
        self.text = ""  # without what became a tool call
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []  # of chat; of completions, one object a token
        self._is_chat = request.kind == "chat"
        self._parser = ToolCallParser(request.tools) if request.tools else None
        self._decoder = getincrementaldecoder("utf-8")(
            "replace"
        )  # of completions' tokens, to count characters
        self._offset = 0  # of the next token in the text, or of the character that it goes on with

    def push(self, said: Said) -> list[dict[str, Any]]:
        """Return what this adds, as OpenAI's deltas without the envelope: text (with its token's logprobs),
        reasoning, tool calls. The end is in `finish_reason` and `stats`.
        """
        chunk = said.chunk
        deltas: list[dict[str, Any]] = []
        if chunk.reasoning:
            self.reasoning += chunk.reasoning
            deltas.append({"reasoning_content": chunk.reasoning, "reasoning": chunk.reasoning})
        deltas += [delta for found in self._parsed(said) if (delta := self._delta(found)) is not None]
        measured = chunk.prompt_logprobs if chunk.logprob is None else (*chunk.prompt_logprobs, chunk.logprob)
        if measured:
            logprobs = [self._logprob(one, said.entries) for one in measured]
            self.logprobs += logprobs
            at = next((delta for delta in deltas if "content" in delta), None)
            if at is None:
                at = {"content": ""}
                deltas.append(at)
            at["logprobs"] = logprobs
        if chunk.finish_reason is not None:
            called = self._parser is not None and self._parser.num_calls > 0
            self.finish_reason = (
                "tool_calls" if called and chunk.finish_reason == "stop" else chunk.finish_reason
            )
            self.stats = chunk.stats
        return deltas

    def _parsed(self, said: Said) -> Sequence[Delta]:
        text = said.chunk.text
        if self._parser is None:
            return [Text(text)] if text else []
        found = list(self._parser.push(text)) if text else []
        return found + list(self._parser.flush()) if said.chunk.finish_reason is not None else found

    def _delta(self, found: Delta) -> dict[str, Any] | None:
        if isinstance(found, Text):
            self.text += found.text
            return {"content": found.text} if found.text else None
        if isinstance(found, CallBegun):
            function = {"name": found.name, "arguments": ""}
            call = {"index": found.index, "id": found.id, "type": "function", "function": function}
            self.calls.append({"id": found.id, "type": "function", "function": dict(function)})
            return {"tool_calls": [call]}
        assert isinstance(found, Arguments), "there are three kinds"
        self.calls[found.index]["function"]["arguments"] += found.text
        return {"tool_calls": [{"index": found.index, "function": {"arguments": found.text}}]}

    def _logprob(self, logprob: Logprob, entries: Mapping[int, bytes]) -> dict[str, Any]:
        if self._is_chat:
            return {
                **_token(logprob.token_id, logprob.logprob, entries),
                "top_logprobs": [_token(one.token_id, one.logprob, entries) for one in logprob.top],
            }
        data, offset = entries[logprob.token_id], self._offset
        self._offset += len(self._decoder.decode(data))
        token = _legacy_token(data)
        if math.isnan(logprob.logprob):  # the first of a prompt
            return {"token": token, "logprob": None, "top": None, "offset": offset}
        top = {_legacy_token(entries[one.token_id]): _finite(one.logprob) for one in logprob.top}
        return {"token": token, "logprob": _finite(logprob.logprob), "top": top or None, "offset": offset}


class Answers:
    """All choices of a request, in OpenAI's envelopes."""

    def __init__(self, request: Request, task: Task, model_id: str) -> None:
        self.request = request
        self._task = task
        self._is_chat = request.kind == "chat"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._id = f"{prefix}-{_unique(task)}"
        self._created = int(time.time())
        self._model_id = model_id
        self._answers = [Answer(request, i) for i in range(len(request.prompts) * request.n)]
        self._begun: set[int] = set()

    def push(self, said: Said) -> list[dict[str, Any]]:
        """Return the chunks of a stream that an event makes, often none."""
        answer = self._answers[said.index]
        deltas = answer.push(said)
        choices = []
        if self._is_chat:
            if said.index not in self._begun:
                self._begun.add(said.index)
                choices.append(
                    self._chat_choice(said.index, {"role": "assistant", "content": ""}, None, None)
                )
            for delta in deltas:
                logprobs = delta.pop("logprobs", None)
                wrapped = None if logprobs is None else {"content": logprobs, "refusal": None}
                choices.append(self._chat_choice(said.index, delta, wrapped, None))
            if answer.finish_reason is not None:
                choices.append(self._chat_choice(said.index, {}, None, answer.finish_reason))
        else:
            for delta in deltas:
                logprobs = delta.pop("logprobs", None)
                found = None if logprobs is None else _legacy_logprobs(logprobs)
                choices.append(self._text_choice(said.index, delta.get("content", ""), found, None))
            if answer.finish_reason is not None:
                choices.append(self._text_choice(said.index, "", None, answer.finish_reason))
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that is to have one."""
        return {**self._envelope(streamed=True), "choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """Return the whole answer; all choices have ended."""
        choices = [self._whole_choice(answer) for answer in self._answers]
        return {**self._envelope(streamed=False), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return what the request took. A prompt counts once, however many answers it has."""
        per_choice = [answer.stats for answer in self._answers if answer.stats is not None]
        per_prompt = per_choice[:: self.request.n]
        prompt = sum(stats.prompt_tokens for stats in per_prompt)
        completion = sum(stats.completion_tokens for stats in per_choice)
        reasoning = sum(stats.reasoning_tokens for stats in per_choice)
        cached = sum(stats.cached_tokens for stats in per_prompt)
        figures, first = self._task.figures(), per_choice[0]
        rates = [stats.tokens_per_second for stats in per_choice if stats.tokens_per_second is not None]
        firsts = [
            s.time_to_first_token_seconds for s in per_choice if s.time_to_first_token_seconds is not None
        ]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
            "spile": {
                "bytes_read": figures.bytes_read,
                "hits": figures.hits,
                "misses": figures.misses,
                "hit_rate": figures.hit_rate,
                "stall_seconds": figures.stall_seconds,
                "compute_seconds": figures.compute_seconds,
                "cached_tokens": cached,
                "exact": first.exact,
                "engine": first.engine,
                "prompt_tokens_per_second": first.prompt_tokens_per_second,
                "tokens_per_second": sum(rates) if rates else None,
                "time_to_first_token_seconds": min(firsts, default=None),
                "memory_bytes": current_memory_bytes(),
                "peak_memory_bytes": max(stats.peak_memory_bytes for stats in per_choice),
            },
        }

    def _envelope(self, *, streamed: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if streamed else "chat.completion"
        kind = chat if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model_id}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._envelope(streamed=True), "choices": choices}
        return {**chunk, "usage": None} if self.request.include_usage else chunk

    @staticmethod
    def _chat_choice(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    @staticmethod
    def _text_choice(
        index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _whole_choice(self, answer: Answer) -> dict[str, Any]:
        asked = "logprobs" in self.request.sampling
        if not self._is_chat:
            found = _legacy_logprobs(answer.logprobs) if asked else None
            return self._text_choice(answer.index, answer.text, found, answer.finish_reason)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = answer.calls
        return {
            "index": answer.index,
            "message": message,
            "logprobs": {"content": answer.logprobs, "refusal": None} if asked else None,
            "finish_reason": answer.finish_reason,
        }


def _unique(task: Task) -> str:
    return f"{task.number:x}{secrets.token_hex(8)}"


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _token(token_id: int, logprob: float, entries: Mapping[int, bytes]) -> dict[str, Any]:
    data = entries[token_id]
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _legacy_token(data: bytes) -> str:
    """A token that is no whole character is written as OpenAI did: `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _legacy_logprobs(tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tops = [token["top"] for token in tokens]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": tops if any(top is not None for top in tops) else None,
        "text_offset": [token["offset"] for token in tokens],
    }
