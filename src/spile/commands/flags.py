"""Turns what several commands ask in the same words into values: how to render, to sample, to open a model.

It does not run anything. A command that takes a dataclass of flags as a parameter gets all of them: `command`
spreads the fields into the signature that the command line is made from, and gathers them again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from spile.errors import OptionError
from spile.generation.options import Sampling
from spile.options import PROMPT_FOLDER_LIMIT, EngineOptions

if TYPE_CHECKING:
    from spile.model import Model

_DEFAULTS = Sampling()
_ENGINE = EngineOptions()
_MODEL_HELP = "A folder or a hub id; default: the demo model."
THINK = ("show", "hide", "off")
_ALSO_ARGUMENTS = ("MODEL", "PROMPT")  # flags whose value may be given without one

PROMPT = "Prompt"
ANSWER = "Answer"
MACHINE = "Model and machine"


@dataclass
class Door:
    """What the outermost door has to know about the command inside."""

    debug: bool = False


def _set_debug(context: typer.Context, value: bool) -> bool:
    door = context.find_root().obj
    if value and isinstance(door, Door):
        door.debug = True
    return value


def _give_way(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Let a positional argument win over a variable; the two are named X and X_argument."""
    source = context.get_parameter_source(parameter.name or "")
    is_variable = source is not None and source.name == "ENVIRONMENT"
    if is_variable and context.params.get(f"{parameter.name}_argument") is not None:
        return None
    return value


def option(*flags: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Declare a flag; its variable is SPILE_ and the first flag's name, as the help's last line says."""
    name = flags[0].split("/")[0].removeprefix("--").replace("-", "_").upper()
    if name in _ALSO_ARGUMENTS:
        more = {"callback": _give_way, **more}
    return typer.Option(
        *flags, envvar=f"SPILE_{name}", show_envvar=False, help=help, rich_help_panel=panel, **more
    )


Model_ = Annotated[str | None, option("--model", "-m", metavar="MODEL", help=_MODEL_HELP, panel=MACHINE)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
Json = Annotated[bool, option("--json", help="Print one JSON object.")]
Offline = Annotated[bool, option("--offline", help="Download nothing.", panel=MACHINE)]
Debug = Annotated[
    bool, option("--debug", callback=_set_debug, is_eager=True, help="Show the traceback of an error.")
]
KvBits = Annotated[
    int,
    option(
        "--kv-bits",
        metavar="N",
        help=f"32, 16, 8 or 4, of keys and values; default {_ENGINE.kv_bits}.",
        panel=MACHINE,
    ),
]
Io = Annotated[
    str,
    option(
        "--io", metavar="MODE", help=f"auto, buffered, direct or mapped; default {_ENGINE.io}.", panel=MACHINE
    ),
]
# Of the reference write-up: docs/write-up.md. The help leaves them out, as --memory is the dial.
FlashMoe = Annotated[
    bool, option("--flash-moe", help="Stream experts even where all fit.", panel=MACHINE, hidden=True)
]
ActiveExperts = Annotated[
    int | None,
    option(
        "--active-experts",
        metavar="N",
        help="Slots a layer; default: what has room.",
        panel=MACHINE,
        hidden=True,
    ),
]
SharedExperts = Annotated[
    int,
    option(
        "--shared-experts",
        metavar="S",
        help="First S of each layer stay resident.",
        panel=MACHINE,
        hidden=True,
    ),
]
KvVBits = Annotated[
    int | None,
    option(
        "--kv-v-bits", metavar="N", help="32, 16, 8 or 4, of values alone; default: as keys.", panel=MACHINE
    ),
]
KvRingBits = Annotated[
    int | None,
    option(
        "--kv-ring-bits",
        metavar="N",
        help="32, 16, 8 or 4, in sliding layers; default 16.",
        panel=MACHINE,
        hidden=True,
    ),
]


@dataclass(frozen=True)
class TemplateFlags:
    """How messages become a prompt."""

    system: Annotated[
        str | None,
        option("--system", metavar="TEXT", help="A system message before all others.", panel=PROMPT),
    ] = None
    chat_template: Annotated[
        Path | None,
        option(
            "--chat-template", metavar="FILE", help="A Jinja template in place of the model's.", panel=PROMPT
        ),
    ] = None
    template_args: Annotated[
        str | None,
        option(
            "--template-args", metavar="JSON", help="More arguments of the template, an object.", panel=PROMPT
        ),
    ] = None
    parse_special: Annotated[
        bool,
        option(
            "--parse-special", help="Marks such as <|im_end|> in messages count.", panel=PROMPT, hidden=True
        ),
    ] = False
    think: Annotated[
        str,
        option(
            "--think",
            metavar="show|hide|off",
            help="Reasoning: dimmed, hidden, or not asked for.",
            panel=PROMPT,
        ),
    ] = "show"

    def arguments(self) -> dict[str, Any]:
        """Return the template's arguments.

        Raises: OptionError for what is no JSON object, and for a `think` that is none.
        """
        check_choice("--think", self.think, THINK)
        if self.template_args is None:
            return {}
        import json

        try:
            value = json.loads(self.template_args)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"--template-args is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise OptionError(
                f"--template-args is a JSON {type(value).__name__}: it must be an object",
                "Such as --template-args '{\"enable_thinking\": false}'.",
            )
        return value


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen and when an answer ends. None and nothing mean the model's default."""

    max_tokens: Annotated[
        int | None,
        option("--max-tokens", metavar="N", help="Default: until the model ends.", panel=ANSWER),
    ] = None
    stop: Annotated[
        list[str] | None,
        option("--stop", metavar="TEXT", help="End before this text; may be repeated.", panel=ANSWER),
    ] = None
    temp: Annotated[
        float | None,
        option(
            "--temp",
            metavar="X",
            help=f"0 is greedy; default: the model's, else {_DEFAULTS.temperature}.",
            panel=ANSWER,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        option("--top-p", metavar="X", help=f"Default: the model's, else {_DEFAULTS.top_p}.", panel=ANSWER),
    ] = None
    top_k: Annotated[
        int | None,
        option("--top-k", metavar="N", help=f"Default: the model's, else {_DEFAULTS.top_k}.", panel=ANSWER),
    ] = None
    min_p: Annotated[
        float | None,
        option("--min-p", metavar="X", help=f"Default: the model's, else {_DEFAULTS.min_p}.", panel=ANSWER),
    ] = None
    seed: Annotated[
        int | None, option("--seed", metavar="N", help="Same seed, same answer.", panel=ANSWER)
    ] = None
    repetition_penalty: Annotated[
        float | None,
        option(
            "--repetition-penalty", metavar="X", help="Divides logits of tokens said; 1 is off.", panel=ANSWER
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        option(
            "--presence-penalty", metavar="X", help="Taken off their logits once; 0 is off.", panel=ANSWER
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        option("--frequency-penalty", metavar="X", help="Taken off for each time; 0 is off.", panel=ANSWER),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        option("--logit-bias", metavar="ID=X", help="Added to a token's logit; -100 is never.", panel=ANSWER),
    ] = None

    def changes(self, **more: Any) -> dict[str, Any]:
        """Return the fields of `Sampling` that were asked for, and `more` of them.

        Raises: OptionError for what is out of range, before any model is looked for.
        """
        changes: dict[str, Any] = {
            ("temperature" if field.name == "temp" else field.name): getattr(self, field.name)
            for field in fields(self)
        }
        changes["stop"] = self.stop or None
        changes["logit_bias"] = _bias_of(self.logit_bias) if self.logit_bias else None
        changes |= more
        if self.max_tokens == 0:
            raise OptionError("max_tokens is 0: an answer has at least one token")
        _DEFAULTS.changed(changes)
        return {name: value for name, value in changes.items() if value is not None}


@dataclass(frozen=True)
class PromptCacheFlags:
    """Where what was read of prompts is kept across runs."""

    prompt_cache: Annotated[
        Path | None,
        option("--prompt-cache", metavar="DIR", help="Keep prompts here, to read once.", panel=PROMPT),
    ] = None
    prompt_cache_limit: Annotated[
        str,
        option(
            "--prompt-cache-limit",
            metavar="SIZE",
            help=f"Most bytes in DIR; default {PROMPT_FOLDER_LIMIT}.",
            panel=PROMPT,
        ),
    ] = PROMPT_FOLDER_LIMIT


@dataclass(frozen=True)
class EngineFlags:
    """Which model, and what of this machine it may use."""

    model: Model_ = None
    memory: Annotated[
        str,
        option("--memory", metavar="SIZE", help="Bound of the whole process, such as 630MB.", panel=MACHINE),
    ] = "auto"
    threads: Annotated[
        int | None,
        option("--threads", metavar="N", help="Default: the physical cores.", panel=MACHINE),
    ] = None
    engine: Annotated[
        str,
        option(
            "--engine", metavar="NAME", help=f"auto, cpu or mlx; default {_ENGINE.engine}.", panel=MACHINE
        ),
    ] = _ENGINE.engine
    io: Io = _ENGINE.io
    kv_bits: KvBits = _ENGINE.kv_bits
    kv_v_bits: KvVBits = _ENGINE.kv_v_bits
    kv_ring_bits: KvRingBits = _ENGINE.kv_ring_bits
    context: Annotated[
        int | None,
        option("--context", metavar="N", help="Most tokens in all; default: what has room.", panel=MACHINE),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        option("--prefill-step-size", metavar="N", help="Tokens of a prompt at a time.", panel=MACHINE),
    ] = _ENGINE.prefill_chunk
    flash_moe: FlashMoe = False
    active_experts: ActiveExperts = _ENGINE.active_experts
    shared_experts: SharedExperts = _ENGINE.shared_experts
    reselect_every: Annotated[
        int,
        option(
            "--reselect-every",
            metavar="R",
            help="Tokens; other than 1 is approximate. 0: after the prompt only.",
            panel=MACHINE,
            hidden=True,
        ),
    ] = _ENGINE.reselect_every
    flash_head: Annotated[
        bool, option("--flash-head", help="The model's clustered head: approximate.", panel=MACHINE)
    ] = _ENGINE.flash_head
    trust_remote_code: Annotated[
        bool,
        option(
            "--trust-remote-code", help="Accepted; no model's code is ever run.", panel=MACHINE, hidden=True
        ),
    ] = False
    offline: Offline = False

    def load(
        self,
        template: TemplateFlags,
        *,
        model: str | None = None,
        sequences: int = 1,
        prompt_cache_bytes: int = 0,
        reserved_bytes: int = 0,
        prompts: PromptCacheFlags | None = None,
    ) -> Model:
        """Open the model: headers and configs; `model` in place of the flag's, with room for `sequences` at once.

        Raises: as `spile.load`.
        """
        from spile.console.terminal import note
        from spile.loading import load
        from spile.sizes import parse_size

        prompts = prompts or PromptCacheFlags()
        if self.trust_remote_code:
            note(
                "--trust-remote-code does nothing: spile runs its own code for every model, never a folder's"
            )
        return load(
            self.model if model is None else model,
            memory=size_or_auto(self.memory),
            threads=self.threads,
            engine=self.engine,
            io=self.io,
            kv_bits=self.kv_bits,
            kv_v_bits=self.kv_v_bits,
            kv_ring_bits=self.kv_ring_bits,
            flash_moe=self.flash_moe,
            active_experts=self.active_experts,
            shared_experts=self.shared_experts,
            reselect_every=self.reselect_every,
            flash_head=self.flash_head,
            context=self.context,
            prefill_chunk=self.prefill_chunk,
            sequences=sequences,
            prompt_cache_bytes=prompt_cache_bytes,
            reserved_bytes=reserved_bytes,
            prompt_cache=prompts.prompt_cache,
            prompt_cache_limit=parse_size(prompts.prompt_cache_limit, name="--prompt-cache-limit"),
            chat_template=template.chat_template,
            parse_special=template.parse_special,
            offline=self.offline,
            on_note=note,
        )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Spread the parameters that are dataclasses of flags into single ones, in their place."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=kinds[field.name],
                )
            )
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

    @functools.wraps(function)
    def spread(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def one_of(name: str, argument: str | None, flag: str, value: str | None) -> str | None:
    """Return what was given as argument or flag; both is one too many, unless they agree."""
    if argument is not None and value is not None and argument != value:
        raise OptionError(f"{name} was given twice: {argument!r} and {flag} {value!r}")
    return value if argument is None else argument


def size_or_auto(text: str) -> int | None:
    """Read a size, or None for 'auto'.

    Raises: OptionError.
    """
    from spile.sizes import parse_budget

    return None if text.strip().lower() == "auto" else parse_budget(text, name="--memory")


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    """Check a flag with few values.

    Raises: OptionError naming them.
    """
    if value not in choices:
        raise OptionError(f"{flag} is {value!r}: it must be one of {', '.join(choices)}")


def _bias_of(given: list[str]) -> dict[int, float]:
    """Return token id -> bias of texts such as '42=-5'."""
    biases: dict[int, float] = {}
    for text in given:
        token_id, _, value = text.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias is {text!r}: it must be a token id and a number, such as 42=-5"
            ) from None
    return biases
