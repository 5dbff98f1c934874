"""Says which path is answered by what: the HTTP face of a `Worker`, as an ASGI app.

It does not know how requests are read (`protocol.py`), answered (`worker.py`), put into words (`answers.py`) or
sent (`streams.py`); it leads one to the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from spile.errors import OptionError, SpileError, quote
from spile.server.answers import Answers
from spile.server.encoding import BodyDecoder
from spile.server.errors import Failure, RequestError, failure_of
from spile.server.guard import Guard
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
from spile.server.streams import COMMENT_SECONDS, EventStream, Mailbox, frames, until_gone, whole
from spile.server.tasks import Failed, Task
from spile.server.visits import CLIENT_LEFT, Visits, visit_of
from spile.server.worker import Worker

if TYPE_CHECKING:
    from spile.model import Model

_BODY_SECONDS = 30.0  # that a client may take to send a body
_DRAINED_FACTOR = 4  # of a body that is too large, how much is still read, so that the refusal arrives
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
    most_body_nbytes: int = 16_000_000
    budget_bytes: int | None = None
    comment_seconds: float = COMMENT_SECONDS


class Service:
    """The endpoints of one worker."""

    def __init__(self, worker: Worker, options: ServerOptions) -> None:
        self._worker = worker
        self._options = options
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
        body = await self._body(http)
        return await self._answer(http, parse_chat(body), len(body))

    async def complete(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        return await self._answer(http, parse_completion(body), len(body))

    async def models(self, http: HttpRequest) -> Response:
        listed = self._options.model_ids[: self._options.num_listed]
        return json_reply({"object": "list", "data": [self._described(name) for name in listed]})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["model_id"]
        self._check_model(name)
        return json_reply(self._described(name))

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        prompt, rendering, adds_first, model = parse_tokenize(body)
        self._check_model(model)

        def encode(loaded: Model, aside: bool) -> list[int]:
            return loaded.encoded(prompt, add_bos=adds_first, aside=aside, **rendering).token_ids

        token_ids = await asyncio.wrap_future(self._worker.beside(encode, len(body)))
        context = self._worker.context
        return json_reply({"tokens": token_ids, "count": len(token_ids), "max_model_len": context})

    async def detokenize(self, http: HttpRequest) -> Response:
        body = await self._body(http)
        token_ids, model = parse_detokenize(body)
        self._check_model(model)

        def decode(loaded: Model, aside: bool) -> str:
            if loaded.tokenizer is None:
                raise RequestError("this model has no tokenizer: it has no text", param="tokens")
            for token_id in token_ids:
                if token_id >= loaded.vocab_size:
                    raise OptionError(
                        f"tokens has {token_id:,}, none of the model's: they go from 0 to {loaded.vocab_size - 1:,}"
                    )
            return b"".join(map(loaded.tokenizer.entry, token_ids)).decode(errors="replace")

        return json_reply({"prompt": await asyncio.wrap_future(self._worker.beside(decode, len(body)))})

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

    async def _answer(self, http: HttpRequest, request: Request, nbytes: int) -> Response:
        self._check_model(request.model)
        mailbox = Mailbox()
        visit = visit_of(http.scope)
        task = visit.task = Task(request, mailbox.send, nbytes, visit.key)
        self._worker.submit(task)
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
        try:
            ended = await until_gone(whole(mailbox, task, answers), http.receive)
        finally:
            cancel()
        if ended is None:
            return _NOBODY
        return failure_reply(ended.failure) if isinstance(ended, Failed) else json_reply(answers.whole())

    async def _body(self, http: HttpRequest) -> bytes:
        """Read a body, up to the limit.

        Raises: RequestError for one that is too large or too slow.
        """
        most, data, size = self._options.most_body_nbytes, bytearray(), 0
        decoder = BodyDecoder(http.headers.get("content-encoding"))
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in http.stream():
                    size += len(chunk)
                    if size <= most and len(data) <= most:
                        data += decoder.push(chunk, most + 1 - len(data))
                    elif size > most * _DRAINED_FACTOR:
                        break
        except TimeoutError:
            raise RequestError(
                f"the body did not come in {_BODY_SECONDS:.0f} seconds", status=408, code="request_timeout"
            ) from None
        if size > most or len(data) > most:
            raise RequestError(
                f"the body has more than {most:,} bytes, the most that this server takes",
                status=413,
                code="request_too_large",
            )
        decoder.finish()
        return bytes(data)

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
