"""Says which path is answered by what: the HTTP face of a `Worker`, as an ASGI app.

It does not know how requests are read (`protocol.py`), answered (`worker.py`), put into words (`answers.py`) or
sent (`streams.py`); it leads one to the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from spile.errors import OptionError, SpileError, quote
from spile.server.answers import Answers
from spile.server.errors import Failure, RequestError, failure_of
from spile.server.guard import Guard
from spile.server.intake import Charge, Intake, Limits
from spile.server.openapi import description
from spile.server.page import load_page
from spile.server.protocol import (
    Request,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_memory,
    parse_tokenize,
)
from spile.server.replies import failure_reply, json_reply
from spile.server.streams import COMMENT_SECONDS, EventStream, Mailbox, WholeReply, frames, until_gone, whole
from spile.server.tasks import Failed, Task
from spile.server.visits import CLIENT_LEFT, Visits, visit_of
from spile.server.worker import Worker

if TYPE_CHECKING:
    from spile.model import Model

_CHOICE_NBYTES = 30_000  # of an answer that has not begun: generators, samplers, what it said
_BIAS_NBYTES = 120  # of one token's, in each answer
# Of a schema that an answer is kept to, in each answer: 142 bytes a character for one of 45,324 characters and 1,600
# properties, 43 to 84 for others, and up to 300 kB for small ones (measured: llguidance, four answers).
_RULE_NBYTES, _RULE_CHARACTER_NBYTES = 300_000, 150
_TOKEN_NBYTES = 48  # of a prompt
_ID_NBYTES = 8  # of one in JSON
_LONGEST_ENTRY_NBYTES = 512
_DECODED_IDS = 20_000  # at once: 30 ms, between two steps of the model
_NOBODY = Response(status_code=CLIENT_LEFT)  # for a client that has left
_VERSION = "/v1"  # without which paths are answered too, as neighbours do


@dataclass(frozen=True)
class ServerOptions:
    """What a server is asked to be, beyond its model. Sizes in bytes, times in seconds."""

    model_ids: Sequence[str]  # by which requests may call the model; the first is what answers say
    num_listed: int = 1  # of them, that the list of models has
    api_keys: Sequence[str] = ()
    hosts: Sequence[str] = ()  # that requests may name beside a loopback address
    origins: Sequence[str] = ()
    is_loopback: bool = True
    limits: Limits = field(default_factory=lambda: Limits.of(None))
    budget_bytes: int | None = None
    comment_seconds: float = COMMENT_SECONDS


class Service:
    """The endpoints of one worker."""

    def __init__(self, worker: Worker, options: ServerOptions) -> None:
        self._worker = worker
        self._options = options
        self.intake = Intake(options.limits)
        self._model_id = options.model_ids[0]
        self._created = int(time.time())
        self._description = json_reply(description(options.model_ids, needs_key=bool(options.api_keys))).body
        self._page = load_page()

    def app(self) -> Visits:
        """Return the ASGI app."""
        versioned = [
            Route("/v1/chat/completions", self._door(self.chat), methods=["POST"]),
            Route("/v1/completions", self._door(self.complete), methods=["POST"]),
            Route("/v1/models", self._door(self.models), methods=["GET"]),
            Route("/v1/models/{model_id:path}", self._door(self.model), methods=["GET"]),
        ]
        routes = [
            *versioned,
            *(Route(one.path.removeprefix(_VERSION), one.endpoint, methods=one.methods) for one in versioned),
            Route("/tokenize", self._door(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._door(self.detokenize), methods=["POST"]),
            Route("/memory", self._door(self.memory), methods=["POST"]),
            Route("/health", self._door(self.health), methods=["GET"]),
            Route("/status", self._door(self.status), methods=["GET"]),
            Route("/metrics", self._door(self.metrics), methods=["GET"]),
            Route("/openapi.json", self._door(self.openapi), methods=["GET"]),
            Route("/", self._door(self.page), methods=["GET"]),
        ]
        paths = frozenset(route.path.partition("{")[0] for route in routes)
        handlers: Any = {HTTPException: partial(_http_failure, sorted(paths)), Exception: _fault}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        options = self._options
        guard = Guard(
            app,
            api_keys=options.api_keys,
            is_loopback=options.is_loopback,
            hosts=options.hosts,
            origins=options.origins,
        )
        return Visits(guard, paths=paths, log=self._worker.log, metrics=self._worker.metrics)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, *await self.intake.take(http, parse_chat, self._answers_nbytes))

    async def complete(self, http: HttpRequest) -> Response:
        return await self._answer(http, *await self.intake.take(http, parse_completion, self._answers_nbytes))

    async def models(self, http: HttpRequest) -> Response:
        listed = self._options.model_ids[: self._options.num_listed]
        return json_reply({"object": "list", "data": [self._described(name) for name in listed]})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["model_id"]
        self._check_model(name)
        return json_reply(self._described(name))

    async def tokenize(self, http: HttpRequest) -> Response:
        parsed, charge = await self.intake.take(http, parse_tokenize, lambda _, nbytes: nbytes * _ID_NBYTES)
        with closing(charge):
            prompt, rendering, adds_first, model = parsed
            self._check_model(model)
            context = self._worker.context

            def encode(
                loaded: Model, aside: bool
            ) -> Response:  # here, where the ids' memory is borrowed from the pool
                token_ids = loaded.encoded(prompt, add_bos=adds_first, aside=aside, **rendering).token_ids
                return json_reply({"tokens": token_ids, "count": len(token_ids), "max_model_len": context})

            reply = await asyncio.wrap_future(self._worker.beside(encode, charge.body_nbytes))
            return WholeReply(reply, on_end=charge.share().close)

    async def detokenize(self, http: HttpRequest) -> Response:
        most = self._options.limits.body_nbytes
        parsed, charge = await self.intake.take(
            http, parse_detokenize, lambda parsed, _: 3 * min(most, len(parsed[0]) * _LONGEST_ENTRY_NBYTES)
        )
        with closing(charge):
            token_ids, model = parsed
            self._check_model(model)
            text = bytearray()

            def decode(loaded: Model, aside: bool, *, piece: list[int]) -> None:
                if loaded.tokenizer is None:
                    raise RequestError("this model has no tokenizer: it has no text", param="tokens")
                if (highest := max(piece, default=0)) >= loaded.vocab_size:
                    raise OptionError(
                        f"tokens has {highest:,}, none of the model's: they go from 0 to {loaded.vocab_size - 1:,}"
                    )
                for entry in map(loaded.tokenizer.entry, piece):
                    text.extend(entry)
                    if len(text) > most:
                        raise RequestError(
                            f"the text has more than {most:,} bytes, the most that this server sends at once",
                            param="tokens",
                            status=413,
                            code="request_too_large",
                        )

            for start in range(0, max(1, len(token_ids)), _DECODED_IDS):
                piece = token_ids[start : start + _DECODED_IDS]
                decoded = self._worker.beside(partial(decode, piece=piece), charge.body_nbytes)
                await asyncio.wrap_future(decoded)
            reply = json_reply({"prompt": text.decode(errors="replace")})
            return WholeReply(reply, on_end=charge.share().close)

    async def memory(self, http: HttpRequest) -> Response:
        """Keep to another budget from the next step on: whoever may do so has a key."""
        if not self._options.api_keys:
            raise RequestError(
                "the budget is changed by whoever has the key, and this server has none: start it with --api-key",
                status=403,
                code="forbidden",
            )
        memory, charge = await self.intake.take(http, parse_memory, lambda _, nbytes: 0)
        with closing(charge):
            return json_reply(await asyncio.wrap_future(self._worker.resize(memory)))

    async def health(self, http: HttpRequest) -> Response:
        found = self._worker.health
        return json_reply({"status": found}, 200 if found == "ok" else 503)

    async def status(self, http: HttpRequest) -> Response:
        return json_reply({**self._worker.status(), "model": self._model_id})

    async def metrics(self, http: HttpRequest) -> Response:
        text = self._worker.metrics.text(self._worker.status())
        return Response(text, media_type="text/plain; version=0.0.4")

    async def openapi(self, http: HttpRequest) -> Response:
        return Response(self._description, media_type="application/json")

    async def page(self, http: HttpRequest) -> Response:
        return Response(self._page.body, headers=self._page.headers)

    def _answers_nbytes(self, request: Request, nbytes: int) -> int:
        """Return the most that answering takes beside what was read: ids of prompts, and each answer's own."""
        each = _CHOICE_NBYTES + len(request.sampling.get("logit_bias") or ()) * _BIAS_NBYTES
        tools = request.tools or ()
        if request.tool_choice == "auto" and not any(tool["function"].get("strict") for tool in tools):
            tools = ()
        if tools or request.response_format:
            written = len(msgspec.json.encode([request.response_format, tools]))
            each += _RULE_NBYTES + written * _RULE_CHARACTER_NBYTES
        prompts = min(nbytes, (self._worker.context or 0) * len(request.prompts)) * _TOKEN_NBYTES
        return prompts + len(request.prompts) * request.n * each

    async def _answer(self, http: HttpRequest, request: Request, charge: Charge) -> Response:
        mailbox, visit = Mailbox(), visit_of(http.scope)
        try:
            self._check_model(request.model)
            task = visit.task = Task(request, mailbox.send, charge.body_nbytes, visit.key)
            task.when_over(charge.close)
            self._worker.submit(task)
        except BaseException:
            charge.close()
            raise
        answers = Answers(request, task, self._model_id)
        cancel = partial(self._worker.cancel, task)
        if request.stream:
            first = None
            try:
                first = await until_gone(mailbox.next(), http.receive)
            finally:
                if first is None:
                    cancel()
            if first is None:
                return _NOBODY
            if isinstance(first, Failed):
                return failure_reply(first.failure)
            seconds = self._options.comment_seconds
            return EventStream(frames(mailbox, first, task, answers, seconds), on_end=cancel)
        with ExitStack() as held:
            held.callback(charge.share().close)
            try:
                ended = await until_gone(whole(mailbox, task, answers, charge), http.receive)
            finally:
                cancel()
            if ended is None:
                return _NOBODY
            if isinstance(ended, Failed):
                return failure_reply(ended.failure)
            return WholeReply(json_reply(answers.whole()), on_end=held.pop_all().close)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._options.model_ids:
            raise RequestError(
                f"there is no model {quote(name)} here: there is {', '.join(self._options.model_ids)}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "spile",
            "max_model_len": self._worker.context,
        }

    def _door(
        self, handle: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Turn every error of a request into its reply; what is nobody's fault but ours goes on to `_fault`."""

        async def answer(http: HttpRequest) -> Response:
            try:
                return await handle(http)
            except ClientDisconnect:
                return _NOBODY
            except (SpileError, MemoryError) as error:
                return failure_reply(failure_of(error))

        return answer


async def _http_failure(paths: Sequence[str], http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    path = quote(http.scope["path"])[1:-1]
    if error.status_code == 404:
        near = " or ".join(_near(http.scope["path"], paths))
        hint = f"did you mean {near}?" if near else "OpenAI's API is at /v1; /openapi.json has all paths"
        message = f"there is nothing at {path}: {hint}"
        failure = Failure(404, message, "invalid_request_error", None, "not_found")
    elif error.status_code == 405:
        message = f"{path} does not take {quote(http.method)[1:-1]}"
        failure = Failure(405, message, "invalid_request_error", None, "method_not_allowed")
    else:
        failure = Failure(error.status_code, error.detail, "invalid_request_error")
    return failure_reply(failure, error.headers)


def _near(path: str, paths: Sequence[str]) -> list[str]:
    """Return the paths that may have been meant: one with the same end, whatever a wrong address put before it, else
    those that are spelled alike.
    """
    parts = [part for part in path[:200].lower().split("/") if part]
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        found = [known for known in paths if known in (f"{_VERSION}/{end}", f"/{end}")]
        if found:
            return found[-1:]
    return get_close_matches("/" + "/".join(parts), paths, 2, 0.7)


async def _fault(http: HttpRequest, error: Exception) -> Response:
    return failure_reply(failure_of(error))
