"""Turns `spile chat` into a conversation: `spile.chat` holds it, this file reads the flags."""
from __future__ import annotations
from spile.commands.flags import command, TemplateFlags, Debug


@command
def chat(template: TemplateFlags = TemplateFlags(), debug: Debug = False) -> None:
    """Talk to a model."""
