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
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

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
    parse_tokenize,
)
from spile.server.replies import failure_reply, json_reply
from spile.server.streams import COMMENT_SECONDS, EventStream, Mailbox, WholeReply, frames, until_gone, whole
from spile.server.tasks import Failed, Task
from spile.server.worker import Worker

if TYPE_CHECKING:
    from spile.model import Model

_HEADERS_SECONDS = 0.5  # that a stream's headers wait for the request to be found in order
_CHOICE_NBYTES = 30_000  # of an answer that has not begun: generators, samplers, what it said
_BIAS_NBYTES = 120  # of one token's, in each answer
# Of a schema that an answer is kept to, in each answer: 142 bytes a character for one of 45,324 characters and 1,600
# properties, 43 to 84 for others, and up to 300 kB for small ones (measured: llguidance, four answers).
_RULE_NBYTES, _RULE_CHARACTER_NBYTES = 300_000, 150
_TOKEN_NBYTES = 48  # of a prompt
_ID_NBYTES = 8  # of one in JSON
_LONGEST_ENTRY_NBYTES = 512
_DECODED_IDS = 20_000  # at once: 30 ms, between two steps of the model
_NOBODY = Response(status_code=400)  # for a client that has left


@dataclass(frozen=True)
class ServerOptions:
    """What a server is asked to be, beyond its model. Sizes in bytes, times in seconds."""

    model_ids: Sequence[str]  # by which requests may call the model; the first is what answers say
    api_key: str | None = None
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
        self._description = json_reply(
            description(options.model_ids, needs_key=options.api_key is not None)
        ).body
        self._page = load_page()

    def app(self) -> ASGIApp:
        """Return the ASGI app."""
        routes = [
            Route("/v1/chat/completions", self._door(self.chat), methods=["POST"]),
            Route("/v1/completions", self._door(self.complete), methods=["POST"]),
            Route("/v1/models", self._door(self.models), methods=["GET"]),
            Route("/v1/models/{model_id:path}", self._door(self.model), methods=["GET"]),
            Route("/tokenize", self._door(self.tokenize), methods=["POST"]),
            Route("/detokenize", self._door(self.detokenize), methods=["POST"]),
            Route("/health", self._door(self.health), methods=["GET"]),
            Route("/status", self._door(self.status), methods=["GET"]),
            Route("/metrics", self._door(self.metrics), methods=["GET"]),
            Route("/openapi.json", self._door(self.openapi), methods=["GET"]),
            Route("/", self._door(self.page), methods=["GET"]),
        ]
        middleware = []
        options = self._options
        if options.origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(options.origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["authorization", "content-type"],
                    max_age=600,
                )
            )
        middleware.append(
            Middleware(
                Guard, api_key=options.api_key, is_loopback=options.is_loopback, origins=options.origins
            )
        )
        handlers: Any = {HTTPException: _http_failure, Exception: _fault}
        app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, *await self.intake.take(http, parse_chat, self._answers_nbytes))

    async def complete(self, http: HttpRequest) -> Response:
        return await self._answer(http, *await self.intake.take(http, parse_completion, self._answers_nbytes))

    async def models(self, http: HttpRequest) -> Response:
        return json_reply({"object": "list", "data": [self._described()]})

    async def model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["model_id"])
        return json_reply(self._described())

    async def tokenize(self, http: HttpRequest) -> Response:
        parsed, charge = await self.intake.take(http, parse_tokenize, lambda _, nbytes: nbytes * _ID_NBYTES)
        with closing(charge):
            prompt, rendering, adds_first, model = parsed
            self._check_model(model)
            context = self._worker.context

            def encode(loaded: Model) -> Response:  # here, where the ids' memory is borrowed from the pool
                token_ids = loaded.encode(prompt, add_bos=adds_first, **rendering)
                return json_reply({"tokens": token_ids, "count": len(token_ids), "max_model_len": context})

            reply = await asyncio.wrap_future(self._worker.call(encode))
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

            def decode(loaded: Model, piece: list[int]) -> None:
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
                await asyncio.wrap_future(self._worker.call(partial(decode, piece=piece)))
            reply = json_reply({"prompt": text.decode(errors="replace")})
            return WholeReply(reply, on_end=charge.share().close)

    async def health(self, http: HttpRequest) -> Response:
        found = self._worker.health
        return json_reply({"status": found}, 200 if found == "ok" else 503)

    async def status(self, http: HttpRequest) -> Response:
        more = {"model": self._model_id, "budget_bytes": self._options.budget_bytes}
        return json_reply({**self._worker.status(), **more})

    async def metrics(self, http: HttpRequest) -> Response:
        status = {**self._worker.status(), "budget_bytes": self._options.budget_bytes}
        text = self._worker.metrics.text(status)
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
        mailbox = Mailbox()
        task = Task(request, mailbox.send, charge.close)
        try:
            self._check_model(request.model)
            self._worker.submit(task)
        except BaseException:
            charge.close()
            raise
        answers = Answers(request, task, self._model_id)
        cancel = partial(self._worker.cancel, task)
        if request.stream:
            try:
                first = await mailbox.next(_HEADERS_SECONDS)
            except BaseException:
                cancel()
                raise
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
                f"there is no model {quote(name)} here: there is {self._model_id}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._model_id,
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
                failure = failure_of(error)
                self._worker.metrics.refused(failure)
                return failure_reply(failure)

        return answer


async def _http_failure(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    path = quote(http.url.path)[1:-1]
    if error.status_code == 404:
        failure = Failure(404, f"there is nothing at {path}", "invalid_request_error", None, "not_found")
    elif error.status_code == 405:
        message = f"{path} does not take {quote(http.method)[1:-1]}"
        failure = Failure(405, message, "invalid_request_error", None, "method_not_allowed")
    else:
        failure = Failure(error.status_code, error.detail, "invalid_request_error")
    return failure_reply(failure, error.headers)


async def _fault(http: HttpRequest, error: Exception) -> Response:
    return failure_reply(failure_of(error))
