"""Schemathesis makes requests of the server's own description: no 5xx, no reply that the description does not have.

That what fits the description is always answered
cannot be promised: that a prompt fits the context, or a token id is one of the model's, no schema can say.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import spile
from serving import running


def test_replies_are_what_the_description_says(tmp_path: Path) -> None:
    load = partial(spile.load, on_note=lambda note: None)
    with running(load, model_ids=("demo",), defaults={"max_tokens": 8}) as server:
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"]
        command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
        command += ["--max-examples", "50", "--request-timeout", "120", "--max-response-time", "100"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:]
        assert server.send("/health").status == 200
        assert "unexpected" not in server.log.getvalue()
