"""The process that runs chat templates: requests come on standard input, answers go out on standard output.

It does not know models. `renderer.py` starts it and reads what it says; it ends with its standard input. A request
is its length in 8 bytes, then JSON. An answer is one letter (t: text, f: a fault of the template's, m: too little
memory), a length, and UTF-8 in which halves of surrogate pairs stand as they are. Memory is bounded by the system where
it does that (RLIMIT_DATA: Linux), computing time by a timer of the system's, whose signal no template can hold back.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress

from spile.text.template import TemplateFault, Templates

_SURROGATES = "surrogatepass"


def main(limit_nbytes: int, limit_seconds: float) -> None:
    """Answer until the other side is gone."""
    with suppress(ValueError, OSError):  # a system without
        resource.setrlimit(resource.RLIMIT_DATA, (limit_nbytes, limit_nbytes))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    templates = Templates()
    while head := sys.stdin.buffer.read(8):
        signal.setitimer(signal.ITIMER_PROF, limit_seconds)
        kind, data = _answer(templates, int.from_bytes(head, "big"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(kind + len(data).to_bytes(8, "big"))
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        del data


def _answer(templates: Templates, length: int) -> tuple[bytes, bytes]:
    try:
        source, variables = json.loads(sys.stdin.buffer.read(length))
        return b"t", templates.run(source, variables).encode("utf-8", _SURROGATES)
    except TemplateFault as fault:
        return b"f", str(fault)[:10_000].encode("utf-8", _SURROGATES)
    except RecursionError:
        return b"f", b"failed: what it is given is nested too deeply"
    except MemoryError:
        return b"m", b""
