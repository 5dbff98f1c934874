"""The same bits on another processor: the core by every compiler at hand, for aarch64 under an emulator.

Opt-in (`pytest -m neon`), in about a minute; `tools/neon` says what it needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import spile
from native.dump import FAULTS, fnv1a, write_all
from spile.architectures import open_own
from spile.engines import open_engine
from spile.files.checkpoint import open_checkpoint
from spile.options import EngineOptions

ROOT = Path(__file__).parent.parent
TOOLS = ("cmake", "g++", "aarch64-linux-gnu-g++", "qemu-aarch64")


@pytest.mark.neon
def test_every_build_and_instruction_set_gives_the_engines_bits(tmp_path: Path) -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}")
    path = os.pathsep.join([str(Path(spile.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [ROOT / "tools/neon", tmp_path],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    hashes: dict[str, set[str]] = defaultdict(set)
    sets: dict[str, set[str]] = defaultdict(set)
    for line in done.stdout.splitlines():
        if len(fields := line.split()) == 7:
            hashes[fields[0]].add(fields[6])
            sets[fields[2]].add(fields[3])
    assert sets["aarch64"] == {"neon", "scalar"}
    assert "scalar" in sets["x86_64"]
    for name in FAULTS:
        assert hashes[name] == {name}
    for name, (folder, ids, options) in write_all(tmp_path).items():
        engine = open_engine(open_own(open_checkpoint(folder)), EngineOptions(**options))
        assert hashes[name] == {fnv1a(engine.logits(engine.new_state(), ids).tobytes())}
        engine.close()


def test_hash_is_the_published_one() -> None:
    assert fnv1a(b"") == "cbf29ce484222325"
    assert fnv1a(b"foobar") == "85944171f73967e8"
