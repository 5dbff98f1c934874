"""Turns the small files beside the weights (tokenizer_config.json, special_tokens_map.json, generation_config.json,
chat_template.jinja) into one checked value.

It does not know the weights, nor what a token is. Nothing in these files is ever executed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spile.errors import TextError
from spile.files.safetensors import check_text
from spile.files.whole import read_whole

# Of files of models in use the largest have 1.2 MB, and a template 17 kB. Parsed, a file takes some 20 times its bytes.
TEXT_PARTS = ("text_config", "language_config", "llm_config")  # of a config of several parts
_MOST_NBYTES = 8_000_000
_MOST_TEMPLATE_NBYTES = 1_000_000


@dataclass(frozen=True)
class Sidecar:
    """What a model folder says about text, as it was written. Absent files are empty mappings and None."""

    tokenizer_config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    chat_template: str | None
    notes: tuple[str, ...]

    def special_token(self, name: str) -> str | None:
        """Return the text of a token that tokenizer_config.json or special_tokens_map.json names, such as
        'eos_token'.
        """
        for file in (self.tokenizer_config, self.special_tokens_map):
            value = file.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str) and value:
                return value
        return None


def read_sidecar(folder: Path) -> Sidecar:
    """Read a model folder's small text files; a file that is not there is no error.

    Raises: TextError for a file that is there and cannot be read as what it should be.
    """
    tokenizer_config = _read_object(folder / "tokenizer_config.json")
    notes = []
    if "auto_map" in tokenizer_config:
        notes.append("tokenizer_config.json names Python code (auto_map): it is ignored, never executed")
    template = read_text(folder / "chat_template.jinja", most_nbytes=_MOST_TEMPLATE_NBYTES)
    if template is None:
        template = _template_of(tokenizer_config.get("chat_template"), folder / "tokenizer_config.json")
    special_tokens_map, generation_config = (
        _read_object(folder / name) for name in ("special_tokens_map.json", "generation_config.json")
    )
    return Sidecar(tokenizer_config, special_tokens_map, generation_config, template, tuple(notes))


def eos_ids_of(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens that a config's `eos_token_id` names, or that of its text part: a number, a list of
    them, or nothing.
    """
    found: set[int] = set()
    for part in (config, *(config.get(name) for name in TEXT_PARTS)):
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        values = value if isinstance(value, list) else [value]
        found |= {v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}
    return frozenset(found)


def _template_of(value: Any, path: Path) -> str | None:
    """Return the template from a string or from a list of named ones: 'default', or the only one."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {
            str(entry["name"]): str(entry["template"])
            for entry in value
            if isinstance(entry, Mapping)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
        if "default" in named:
            return named["default"]
        if len(named) == 1:
            return next(iter(named.values()))
        raise TextError(f"{path} lists {len(named)} chat templates and none is named 'default'")
    raise TextError(f"chat_template in {path} is neither text nor a list of named templates")


def read_text(
    path: Path, *, most_nbytes: int = _MOST_NBYTES, hint: str = "Download the file again."
) -> str | None:
    """Read a text file; None when there is none. `hint` is for one that is not UTF-8.

    Raises: TextError when it cannot be read, is no regular file, too large, or not UTF-8.
    """
    try:
        return read_whole(path, most_nbytes, TextError).decode("utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text (byte {error.start:,})", hint=hint) from error


def _read_object(path: Path) -> Mapping[str, Any]:
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
        check_text(text, value)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} is not valid JSON: {error}", hint="Download the file again.") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
