"""Turns the help of every command into docs/cli.md, so that the two never differ.

    python tools/write_cli_docs.py            writes docs/cli.md
    python tools/write_cli_docs.py --check    exits 1 when docs/cli.md is not what it would write

A test makes the same check, so CI does. What the flags mean beyond a line is said here, below.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spile.cli import app
from spile.commands.help import help_texts, hidden_flags

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

BEGIN = """\
# The command line

Written by `tools/write_cli_docs.py` from the commands' own help; change it there.

Answers go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed (a missing or unfit
model included), 2 wrong usage, 130 interrupted. An error is one line, `error: ...`, and where something can be done
about it a second one, `hint: ...`; `--debug` shows the traceback. `NO_COLOR`, dumb terminals, pipes and ASCII-only
terminals are respected.
"""

NOTES = {
    "spile generate": """\
- **Ends.** Without `--max-tokens` an answer goes on until the model ends it or the context is full. `--stop` looks
  at the decoded text, across tokens, and cuts the answer before it; in a reasoning model it looks at the answer,
  not at the reasoning. The tokens of a stop text count, as they were computed. With `--ignore-eos` end tokens are
  never chosen, so that a benchmark measures text, and not what a model says past an end token.
- **Order.** Bias, then penalties, top-k, top-p, min-p, then temperature (llama.cpp's order). Penalties look at the
  answer so far, not at the prompt. A bias of -100 excludes a token. Temperatures below 1e-6 are greedy, as 0 is.
- **Log-probabilities** are the model's own: before bias, penalties, filters and temperature.
- **Reasoning.** Where the chat template has `<think>` markers, what stands between them is shown dimmed on a
  terminal; in a pipe it goes to standard error, so that standard output has the answer alone; with `--json` it is
  the field `reasoning`. `--think hide` leaves it out, `--think off` asks the template for none (`enable_thinking`
  false).
- **Prompts that are read once.** With `--prompt-cache DIR` what was read of a prompt, and of its answer, is kept in
  files in DIR, and a later prompt that begins alike is read from where it differs. `--save-prompt FILE` writes one
  prompt once it is read, and then it is answered. `--load-prompt FILE` goes on from it: PROMPT is appended to
  the text that was saved (the message, or with `--raw` the text), and the system message is the saved one unless
  another is given; PROMPT may be left out. None of this changes an answer by a bit: the prompt is encoded as a whole,
  and only what it shares with what was kept is not computed again (`cached_tokens` of `--json` says how much; the
  last token always is). Files hold the prompt's ids, its keys and values, and in a saved prompt its text; they are
  readable by their owner alone and as private as what was said. A file of another model (told by config, tensor
  names and a sample of every tensor), of other KV bits or of another version is refused with what differs, and so is
  a damaged one. DIR keeps to `--prompt-cache-limit`: what was used least lately goes. Several processes may share it.
  Layers with a sliding window can be cut only where a whole window was kept: before a prompt's end, an answer's end
  and the last message.
- **Variables that hold several values** (`SPILE_STOP`, `SPILE_LOGIT_BIAS`) are split at white space.
""",
    "spile chat": """\
- **Lines.** A line that ends in a backslash goes on; three double quotes begin and end a block; what is pasted is
  one message, and Alt-Enter makes a new line, where Python has GNU readline. In a pipe every line is a message, and
  the first error ends it.
- **Keys.** Ctrl-C stops an answer, and what there is of it stays in the conversation; Ctrl-D leaves.
- **Turns.** A turn reads only what is new: the model's state goes on from the longest beginning that the next
  prompt shares with what it holds. Reasoning is not sent back; so that the next turn need not be read from
  the beginning after a long one, a sixteenth of `--memory` (64 MB at most, nothing below 400 MB) keeps what layers with
  a sliding window hold before the answer. `--prompt-cache DIR` also keeps conversations from one chat to the next,
  as for `spile generate`.
- **Context.** At its end the answer stops and chat says so. With `--overflow drop-oldest` the oldest turns are
  dropped instead, until half of the context is free; it says how many.
- **History.** Messages are remembered for the arrow keys in `$XDG_STATE_HOME/spile/chat_history` (`~/.local/state`
  where that is not set), readable by its owner alone; `--history FILE` names another file, `--history none` none.

Commands inside of a chat:

```
{commands}
```
""",
}


def page() -> str:
    """Return what docs/cli.md should hold."""
    from spile.console.chat import HELP

    parts, hidden = [BEGIN], dict(hidden_flags(app))
    for path, text in help_texts(app):
        heading = "" if path == "spile" else f"## {path}\n\n"
        parts.append(f"{heading}```\n{text}\n```\n")
        if path in hidden:
            rows = "\n".join(hidden[path])
            parts.append(
                f"Flags that its help leaves out ([what they are for](write-up.md)):\n\n```\n{rows}\n```\n"
            )
        if path in NOTES:
            parts.append(NOTES[path].replace("{commands}", HELP))
    parts.append(
        "## Shell completion\n\n`spile --install-completion` sets it up for bash, zsh, fish and PowerShell;\n"
        "`spile --show-completion` shows what that would install.\n"
    )
    return "\n".join(parts)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != text:
            print(
                f"{PAGE} differs from the commands' help: run python tools/write_cli_docs.py", file=sys.stderr
            )
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
