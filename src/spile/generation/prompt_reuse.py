"""What a model does with earlier prompts: the cache it keeps, the prompts it saves by name and goes on from.

It ties together `prompt_cache.py` and what a caller asks for, and checks that first. A saved prompt knows the text it
was made from: a prompt that goes on from it is that text and the new one, encoded as if both had been given in one,
so the answer is the same as without the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from spile.engines.base import CopyableState, Engine, State
from spile.errors import OptionError, PromptFileError, WriteError, quote
from spile.generation.prompt_cache import PromptCache, SavedPrompt, save_prompt
from spile.generation.prompt_files import is_prompt_file
from spile.generation.prompt_folder import PromptFolder
from spile.machine import available_memory_bytes
from spile.text.prompts import is_ids

_LEAST_BUDGET_NBYTES = 400_000_000  # below it, experts need the memory more
_EIGHTH_FROM_NBYTES = 1_000_000_000
_MOST_NBYTES = 1_000_000_000
_NO_TEXT = "Go on from it with a list of ids, or save it from a text."


class PromptReuse:
    """The prompts of one model. `cache` is None where nothing is kept."""

    def __init__(
        self,
        fingerprint: Callable[[], str],
        *,
        budget_nbytes: int = 0,
        folder: Path | None = None,
        limit_nbytes: int = 0,
        obstacle: str | None = None,
        on_note: Callable[[str], None],
    ) -> None:
        """`limit_nbytes` is the folder's;
        `obstacle` says why a state depends on more than its tokens, if it does: then nothing is kept."""
        self._known: str | None = None
        self._fingerprint = fingerprint
        self._obstacle = obstacle
        self._on_note = on_note
        self.cache: PromptCache | None = None
        if folder is not None and folder.exists() and not folder.is_dir():
            raise OptionError(f"the prompt cache {folder} is a file: it must be a folder, or a new name")
        if not budget_nbytes and folder is None:
            return
        if obstacle is not None:
            on_note(f"nothing is kept of earlier prompts: {obstacle}")
            return

        def open_folder(identity: Any) -> PromptFolder:
            assert folder is not None, "a folder was named"
            return PromptFolder(folder, limit_nbytes, identity, on_note)

        self.cache = PromptCache(
            budget_nbytes,
            None if folder is None else open_folder,
            fingerprint=self.fingerprint,
            on_note=on_note,
        )

    def fingerprint(self) -> str:
        """Return the model's name by content. Touches disk the first time."""
        if self._known is None:
            self._known = self._fingerprint()
        return self._known

    def saved(self, path: object) -> SavedPrompt:
        """Open a saved prompt, for `stream` to go on from.

        Raises: PromptFileError, OptionError.
        """
        checked = _checked(path, "load_prompt")
        self._check_possible("load_prompt")
        return SavedPrompt.open(checked, self.fingerprint())

    def saver(self, path: object, token_ids: Sequence[int], about: dict[str, Any]) -> Callable[[State], None]:
        """Return what saves a state that holds these tokens.

        Raises: OptionError, and WriteError where nothing can be written.
        """
        checked = _checked(path, "save_prompt")
        if checked.is_symlink():  # which stays, and its file is replaced
            checked = checked.resolve()
        self._check_possible("save_prompt")
        if not checked.parent.is_dir():
            raise WriteError(f"{checked} cannot be written: there is no folder {checked.parent}")
        if checked.exists() and not is_prompt_file(checked):
            raise WriteError(f"{checked} is there and holds no saved prompt", "Choose another name.")

        def save(state: State) -> None:
            assert isinstance(state, CopyableState), "checked before the prompt was read"
            if rest := list(token_ids[state.num_reusable :]):
                about["rest"] = rest
            identity = {"model": self.fingerprint(), **state.identity}
            save_prompt(checked, token_ids, state, identity=identity, about=about)

        return save

    def check_savable(self, engine: Engine, num_tokens: int) -> None:
        """Check, before a prompt is read, that what an engine makes of it can be saved.

        Raises: OptionError.
        """
        with closing(engine.new_state()) as state:
            if not isinstance(state, CopyableState):
                raise OptionError(
                    f"save_prompt is not possible: the {engine.name} engine cannot copy this model's states"
                )
            if state.step > 1 and num_tokens <= state.step:
                raise OptionError(
                    f"save_prompt needs more than {state.step:,} tokens and the prompt has {num_tokens:,}: the "
                    f"{engine.name} engine goes on from whole chunks",
                    "Give a longer prompt, or a smaller prefill chunk.",
                )

    def note_unused(self, saved: SavedPrompt) -> None:
        """Say so when a prompt could not go on from a saved one."""
        if saved.num_found == 0:
            self._on_note(
                f"{saved.file.path} was of no use: the prompt leaves the {saved.file.end:,} tokens in it too early"
            )

    def _check_possible(self, what: str) -> None:
        if self._obstacle is not None:
            raise OptionError(f"{what} is not possible: {self._obstacle}")


def default_cache_nbytes(memory_bytes: int | None, *, is_held: bool = False) -> int:
    """Return what of a budget to keep for earlier prompts by default: an eighth, or a sixteenth below 1 GB, where
    experts need the rest more, and where one state lives on, which then needs windows of sliding layers alone
    (24 MB the window of a 20B Maple).
    """
    memory = available_memory_bytes() if memory_bytes is None else memory_bytes
    if memory < _LEAST_BUDGET_NBYTES:
        return 0
    if is_held or memory < _EIGHTH_FROM_NBYTES:
        return min(memory // 16, _MOST_NBYTES // 16)
    return min(memory // 8, _MOST_NBYTES)


def continued(saved: SavedPrompt, prompt: Any, *, raw: bool, system: str | None) -> tuple[Any, str | None]:
    """Return the prompt, and the system message, of a text or of ids that go on from a saved prompt; messages
    stay as they are.

    Raises: OptionError for a text after ids, or one of another kind.
    """
    about = saved.about
    if isinstance(prompt, str):
        text = about.get("text")
        if not isinstance(text, str):
            raise OptionError(
                f"{saved.file.path} was not saved from a text: no text can go on from it", _NO_TEXT
            )
        if bool(about.get("raw")) != raw:
            was, now = ("with", "without") if about.get("raw") else ("without", "with")
            raise OptionError(f"{saved.file.path} was saved {was} raw, and this prompt is {now} it")
        return text + prompt, about.get("system") if system is None else system
    if is_ids(prompt):
        return [*saved.file.token_ids.tolist(), *about.get("rest", ()), *prompt], system
    return prompt, system


def _checked(path: object, name: str) -> Path:
    if not isinstance(path, (str, Path)):
        raise OptionError(f"{name} is {quote(path)}: it must be a text or a Path")
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:
        raise PromptFileError(f"{quote(str(path))} cannot be a file's name: {error}") from error
