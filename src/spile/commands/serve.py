"""Turns the flags of `spile serve` into a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from spile.commands.flags import (
    ANSWER,
    Debug,
    EngineFlags,
    ModelArgument,
    PromptCacheFlags,
    TemplateFlags,
    command,
    one_of,
    option,
    size_or_auto,
)
from spile.errors import OptionError
from spile.generation.options import Sampling

if TYPE_CHECKING:
    from spile.model import Model

SERVER = "Server"
_MOST_PORT = 65_535
_MOST_PARALLEL, _MOST_QUEUE = 64, 10_000
_LEAST_BODY_NBYTES, _MOST_BODY_NBYTES = 1_000_000, 16_000_000
_PARALLEL = 4  # by default
# Of a budget, for each answer whose whole context has KV room at once: the 20B Maple's takes 66 MB in 630 MB. Room for
# four there left 16 slots of 6,144 (measured); short answers share the room of a long one all the same.
_SEQUENCE_BUDGET_NBYTES = 500_000_000
_DEFAULTS = Sampling()


@dataclass(frozen=True)
class ServerFlags:
    """Where to listen, to whom, and to how many at once."""

    host: Annotated[
        str,
        option("--host", metavar="ADDRESS", help="Default: 127.0.0.1; others need --api-key.", panel=SERVER),
    ] = "127.0.0.1"
    port: Annotated[
        int, option("--port", metavar="N", help="Default: 8080; 0 takes a free one.", panel=SERVER)
    ] = 8080
    api_key: Annotated[
        str | None,
        option("--api-key", metavar="KEY", help="Clients must send it; or SPILE_API_KEY.", panel=SERVER),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        option("--cors-origin", metavar="URL", help="Web pages that may call; repeatable.", panel=SERVER),
    ] = None
    model_id: Annotated[
        str | None,
        option(
            "--model-id",
            "--alias",
            metavar="NAME",
            help="What clients call it; default: folder.",
            panel=SERVER,
        ),
    ] = None
    parallel: Annotated[
        int | None,
        option("--parallel", metavar="N", help="Answers at once; default 4, as far as fit.", panel=SERVER),
    ] = None
    max_queue: Annotated[
        int, option("--max-queue", metavar="N", help="Requests that may wait; default 32.", panel=SERVER)
    ] = 32
    prompt_cache_size: Annotated[
        str | None,
        option(
            "--prompt-cache-size", metavar="SIZE", help="Of memory, for prompts read before.", panel=SERVER
        ),
    ] = None

    def check(self) -> None:
        """Check what can be told before anything is opened.

        Raises: OptionError naming the flag.
        """
        for name, value, least, most in (
            ("--port", self.port, 0, _MOST_PORT),
            ("--parallel", self.parallel, 1, _MOST_PARALLEL),
            ("--max-queue", self.max_queue, 0, _MOST_QUEUE),
        ):
            if value is not None and not least <= value <= most:
                raise OptionError(f"{name} is {value:,}: it must be from {least:,} to {most:,}")
        if self.api_key is not None and not self.api_key.strip():
            raise OptionError("--api-key is empty")
        if self.model_id is not None and not self.model_id.strip():
            raise OptionError("--model-id is empty")

    def sequences(self, budget: int | None) -> int:
        """Return for how many answers that fill the context there is to be KV room at once."""
        if self.parallel is not None:
            return self.parallel
        return _PARALLEL if budget is None else min(max(budget // _SEQUENCE_BUDGET_NBYTES, 1), _PARALLEL)


@dataclass(frozen=True)
class DefaultFlags:
    """What answers are like where a request does not say. None means the model's default."""

    temp: Annotated[
        float | None, option("--temp", metavar="X", help="0 is greedy; default: the model's.", panel=ANSWER)
    ] = None
    top_p: Annotated[
        float | None, option("--top-p", metavar="X", help="Default: the model's.", panel=ANSWER)
    ] = None
    top_k: Annotated[
        int | None, option("--top-k", metavar="N", help="Default: the model's.", panel=ANSWER)
    ] = None
    min_p: Annotated[
        float | None, option("--min-p", metavar="X", help="Default: the model's.", panel=ANSWER)
    ] = None
    max_tokens: Annotated[
        int | None, option("--max-tokens", metavar="N", help="Default: until the model ends.", panel=ANSWER)
    ] = None

    def changes(self) -> dict[str, Any]:
        """Return the sampling fields that were given.

        Raises: OptionError for what is out of range.
        """
        given = {
            "temperature": self.temp,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_tokens": self.max_tokens,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        _DEFAULTS.changed(changes)
        if self.max_tokens == 0:
            raise OptionError("max_tokens is 0: no request would get an answer")
        return changes


@command
def serve(
    model_argument: ModelArgument = None,
    server: ServerFlags = ServerFlags(),
    sampling: DefaultFlags = DefaultFlags(),
    chat_template: Annotated[
        Path | None,
        option(
            "--chat-template", metavar="FILE", help="A Jinja template in place of the model's.", panel=ANSWER
        ),
    ] = None,
    parse_special: Annotated[
        bool,
        option("--parse-special", help="Marks such as <|im_end|> in messages count.", panel=ANSWER),
    ] = False,
    prompts: PromptCacheFlags = PromptCacheFlags(),  # noqa: B008
    engine: EngineFlags = EngineFlags(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Answer over HTTP, as OpenAI's API does."""
    source = one_of("MODEL", model_argument, "--model", engine.model)
    server.check()
    defaults = sampling.changes()
    budget = size_or_auto(engine.memory)
    cache_nbytes = _cache_nbytes(server.prompt_cache_size, budget, engine.reselect_every)
    from spile.console.terminal import note
    from spile.server.app import ServerOptions
    from spile.server.guard import is_loopback
    from spile.server.listen import open_socket
    from spile.server.run import Load, Serving

    parallel = server.parallel or _PARALLEL
    host = server.host
    if host.startswith("[") and host.endswith("]"):  # as in a URL
        host = host[1:-1]
    loopback = is_loopback(host)
    if not loopback and server.api_key is None:
        raise OptionError(
            f"--host {host} lets others reach this server, and it has no key",
            "Give --api-key KEY (or SPILE_API_KEY), or leave --host out.",
        )
    with open_socket(host, server.port) as listener:
        address = _url(listener.getsockname())
        note(f"listening on {address}, loading the model", word="")

        def open_model() -> Model:
            return engine.load(
                TemplateFlags(chat_template=chat_template, parse_special=parse_special),
                model=source,
                sequences=server.sequences(budget),
                prompt_cache_bytes=cache_nbytes,
                prompts=prompts,
            )

        options = ServerOptions(
            model_ids=_model_ids(source, server.model_id),
            api_key=server.api_key,
            origins=tuple(server.cors_origin or ()),
            is_loopback=loopback,
            most_body_nbytes=_most_body_nbytes(budget),
            budget_bytes=budget,
        )
        Serving(
            listener,
            Load(open_model, has_budget=budget is not None, parallel=parallel),
            options,
            parallel=parallel,
            max_queue=server.max_queue,
            defaults=defaults,
            on_ready=lambda model: note(
                f"{model.summary}\nready: {address}/v1, a page to chat at {address}/", word=""
            ),
        ).run()


def _model_ids(source: str | None, given: str | None) -> tuple[str, ...]:
    """Return the names that clients may call the model by; the first is the one that answers have."""
    if source is None:
        own = ["demo"]
    elif os.path.isdir(os.path.expanduser(source)):
        own = [os.path.basename(os.path.realpath(os.path.expanduser(source)))]
    else:
        own = [source, source.rsplit("/", 1)[-1]]
    return tuple(dict.fromkeys([given, *own] if given else own))


def _cache_nbytes(asked: str | None, budget: int | None, reselect_every: int) -> int:
    """Return the memory that prompts read before may take: what was asked for, else a part of the budget."""
    from spile.generation.prompt_reuse import default_cache_nbytes
    from spile.sizes import parse_size

    if reselect_every != 1:  # then keys and values depend on more than the prompt
        if asked is not None:
            raise OptionError("--prompt-cache-size cannot go with --reselect-every other than 1")
        return 0
    if asked is None:
        return default_cache_nbytes(budget, is_held=False)
    return 0 if asked == "0" else parse_size(asked, name="--prompt-cache-size")


def _most_body_nbytes(budget: int | None) -> int:
    """Return the largest body that is taken: more than any context holds, but a small part of a budget."""
    if budget is None:
        return _MOST_BODY_NBYTES
    return min(max(budget // 200, _LEAST_BODY_NBYTES), _MOST_BODY_NBYTES)


def _url(address: Any) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
