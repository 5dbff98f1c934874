"""Turns a prompt of any kind (text, messages, token ids) into the text that a model goes on from.

It does not know token ids' meaning, engines or answers. Text and messages go through the model's chat
template unless the prompt is raw; ids are what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from spile.errors import OptionError, TextError
from spile.text.marks import Hidden, Marks
from spile.text.messages import Message, checked_tools, plain_messages
from spile.text.reasoning import ReasoningSplitter, begins_inside, can_reason
from spile.text.renderer import Renderer
from spile.text.sidecar import Sidecar

Prompt = str | Sequence[Message] | Sequence[int]  # text, messages, or token ids
OnNote = Callable[[str], None]

_SWITCH = "enable_thinking"  # the template's argument, in Maple, Qwen and others
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Rendering:
    """How a prompt becomes text.

    `raw` goes on from a text as it is, without template. `system` is put before the messages. `think` False
    asks the template to leave reasoning out. `tools` and `arguments` are the template's.
    """

    raw: bool = False
    system: str | None = None
    think: bool = True
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptText:
    """The text that a model goes on from, and what splits its answer: None where it does not reason. `hidden` says
    what was replaced in it so that nobody but the template makes a mark.
    """

    text: str
    splitter: ReasoningSplitter | None = None
    hidden: Hidden | None = None


def is_ids(prompt: Any) -> bool:
    """Whether a prompt is token ids. An empty list is.

    Raises: OptionError for what can be no prompt at all.
    """
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Collection):
        raise OptionError(f"prompt is a {type(prompt).__name__}: it must be text, messages or token ids")
    return not isinstance(prompt, str) and all(isinstance(item, Integral) for item in prompt)


def check_ids_rendering(rendering: Rendering) -> None:
    """Check that nothing was asked of a prompt of ids that only text can have.

    Raises: OptionError naming it.
    """
    if rendering.system is not None:
        raise OptionError("system is for text and messages: a prompt of token ids already says everything")
    if rendering.tools:
        raise OptionError("tools is for text and messages: a prompt of token ids already says everything")


def prompt_text(
    prompt: str | Sequence[Message],
    rendering: Rendering,
    sidecar: Sidecar,
    renderer: Renderer,
    on_note: OnNote,
    find_marks: Callable[[], Marks] | None = None,
) -> PromptText:
    """Return the text of a prompt that is no list of ids. Where a template makes it, what `find_marks` returns is
    hidden in all that it is given.

    Raises:
        OptionError: messages or options that do not go together, or are none.
        TextError: no template where one is needed, or it refuses or fails.
    """
    template = sidecar.chat_template
    if rendering.raw:
        return PromptText(_raw_text(prompt, rendering))
    if template is None:
        what = _needs_template(prompt, rendering)
        if what is not None:
            raise TextError(
                f"this model has no chat template, and {what} needs one",
                "Give a raw text, or a template by --chat-template (chat_template of spile.load).",
            )
        assert isinstance(prompt, str), "everything else needs a template"
        on_note("this model has no chat template: the prompt is taken as raw text")
        return PromptText(prompt)
    messages: list[Message] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    )
    if rendering.system is not None:
        messages.insert(0, {"role": "system", "content": rendering.system})
    arguments: dict[str, Any] = {"tools": checked_tools(rendering.tools)} if rendering.tools else {}
    if not rendering.think:
        if _SWITCH not in template and can_reason(template):
            on_note("this model's chat template has no switch for its reasoning: it may reason all the same")
        arguments[_SWITCH] = False
    special = {name: text for name in _SPECIAL_TOKENS if (text := sidecar.special_token(name)) is not None}
    given: dict[str, Any] = {
        "messages": plain_messages(messages),
        "arguments": {**arguments, **rendering.arguments},
    }
    hidden = None
    if find_marks is not None:
        given, hidden = find_marks().hide(given)
    text = renderer.render(
        template, **given, special_tokens=special, restore=None if hidden is None else hidden.restore
    )
    splitter = ReasoningSplitter(has_begun=begins_inside(text)) if can_reason(template) else None
    return PromptText(text, splitter, hidden)


def _raw_text(prompt: str | Sequence[Message], rendering: Rendering) -> str:
    if not isinstance(prompt, str):
        raise OptionError("raw needs a text: a list of messages needs the chat template")
    what = _needs_template(prompt, rendering)
    if what is not None:
        what = what.removeprefix("a ").removesuffix(" message")
        raise OptionError(f"{what} needs the chat template, which raw leaves out: give one of the two")
    return prompt


def _needs_template(prompt: str | Sequence[Message], rendering: Rendering) -> str | None:
    """Return what in a prompt cannot do without a template; None where it can."""
    if not isinstance(prompt, str):
        return "a list of messages"
    if rendering.system is not None:
        return "a system message"
    return "tools" if rendering.tools else None
