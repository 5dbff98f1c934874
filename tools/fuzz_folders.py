"""Damages model folders in thousands of ways and runs each: load, plan, four tokens. Counts what should not be.

    python tools/fuzz_folders.py [--count 3000] [--seed 0]

Each damaged folder is run in one of a few processes that are started anew when one dies. Counted: refused in a
sentence, answered, over 5 s, over 300 MB more than an undamaged one, errors that are no SpileError, deaths. A line for
each of the last four names the seed, which alone makes the folder again: `--seed N --count 1 --keep DIR`.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW_SECONDS, LARGE_NBYTES = 5.0, 300_000_000
JSON_FILES = (
    "config.json",
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
    "shard",
    "shard",
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 64, 128, 2**31, 2**63, 10**30, -(2**40), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", " ", "x", "\x1b[31mred", "\u202e", "\ud800", "\0", "../../etc/passwd", "a" * 100_000, [], {},
    [[]], [0], [None], {"a": 1},
    "{{ 'x'.center(900000000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "<|im_end|>",
)  # fmt: skip


def nodes(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of some values in JSON: of a long list or object, the first and a few more."""
    found = [place] if place else []
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    for key in keys[:60]:
        found += nodes(value[key], (*place, key))
    return found


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Change one to three places."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = nodes(value)
        if not places:
            return rng.choice(VALUES)
        *path, key = rng.choice(places)
        parent = value
        for step in path:
            parent = parent[step]
        kind = rng.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(("", "x", "\x1b]0;t\a", str(key) + "_"))] = parent.pop(key)
        elif kind == 2 and isinstance(parent[key], int | float):
            parent[key] = parent[key] * rng.choice((-1, 2, 0.5, 10**6)) + rng.choice((-1, 0, 1))
        elif kind == 3 and isinstance(parent[key], str):
            text = parent[key]
            at = rng.randrange(len(text) + 1)
            parent[key] = (
                text[:at]
                + rng.choice(("\x1b", "\ud800", "x", "{{", "%}", "\n"))
                + text[at + rng.randrange(3) :]
            )
        elif kind == 4:
            other: Any = value
            for step in rng.choice(places):
                other = other[step] if not isinstance(other, str | int | float | None) else other
            parent[key] = json.loads(json.dumps(other))
        elif kind == 5:
            deep: Any = []
            for _ in range(rng.choice((3, 2000))):
                deep = [deep]
            parent[key] = deep
        else:
            parent[key] = rng.choice(VALUES)
    return value


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Cut, flip, insert, remove or fill."""
    out = bytearray(data)
    at = rng.randrange(len(out) + 1)
    kind = rng.randrange(6)
    if kind == 0:
        return bytes(out[:at])
    if kind == 1 and out:
        for _ in range(rng.choice((1, 8))):
            out[rng.randrange(len(out))] = rng.randrange(256)
    elif kind == 2:
        out[at:at] = rng.choice(
            (b"\0" * 100, b"{" * 5000, b"[" * 200_000, b"\xff", b'"', b"1" * 10_000, b"\xef\xbb\xbf")
        )
    elif kind == 3:
        del out[at : at + rng.choice((1, 10, 1000))]
    elif kind == 4:
        out[at : at + 100] = bytes(len(out[at : at + 100]))
    else:
        return rng.choice(
            (
                b"",
                b"<html>no</html>",
                b"version https://git-lfs.github.com/spec/v1\n",
                b"null",
                b"\xff\xfe{\0}\0",
            )
        )
    return bytes(out)


def mutate_file(rng: random.Random, path: Path) -> None:
    """Put something else in a file's place."""
    path.unlink(missing_ok=True)
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        with path.open("wb") as file:
            file.truncate(64 * 10**9)
    elif kind == 4:
        path.symlink_to(path.name)


def mutate(rng: random.Random, folder: Path) -> str:
    """Damage one file of a folder; say which and how."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # to write what is nested deeply
    try:
        return _mutate(rng, folder)
    finally:
        sys.setrecursionlimit(usual)


def _mutate(rng: random.Random, folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    shard = rng.choice([name for name in names if name.endswith(".safetensors")])
    name = rng.choice(JSON_FILES)
    how = rng.choices(("json", "bytes", "file"), (70, 25, 5))[0]
    path = folder / (shard if name == "shard" else name)
    if how == "file":
        mutate_file(rng, path)
    elif name == "shard":
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, rest = data[8 : 8 + length], data[8 + length :]
        if how == "json":
            header = dumped(rng, mutate_json(rng, json.loads(header)))
            length = len(header)
        else:
            header = mutate_bytes(rng, header)
            length = rng.choice((len(header), len(header), length, 2**63, 0, rng.randrange(2**28)))
        path.write_bytes(struct.pack("<Q", length) + header + rest)
    elif not path.exists():
        path.write_bytes(dumped(rng, {"eos_token": rng.choice(VALUES), "unk_token": rng.choice(VALUES)}))
    elif how == "json":
        path.write_bytes(dumped(rng, mutate_json(rng, json.loads(path.read_bytes()))))
    else:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    return f"{path.name} {how}"


def dumped(rng: random.Random, value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def peak_nbytes() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))


def run_one(folder: Path) -> tuple[str, str]:
    """Load, plan and answer; say how it ended and in which words."""
    import spile
    from spile.errors import SpileError
    from spile.memory import current_memory_bytes

    try:
        with spile.load(
            folder,
            memory=current_memory_bytes() + 150_000_000,
            threads=1,
            offline=True,
            on_note=lambda note: check(note),
        ) as model:
            answer = model.generate(
                [{"role": "user", "content": "Hi <|im_end|>"}], max_tokens=4, temperature=0.0, seed=1
            )
            return "answered", answer.text
    except SpileError as error:
        check(str(error) + (error.hint or ""))
        return "refused", str(error)


def check(text: str) -> None:
    if not text.isprintable() or len(text) > 5000:
        raise AssertionError(f"a message that is not clean: {text[:200]!r}")


def work(pipe: Any) -> None:
    import warnings

    warnings.simplefilter("ignore")
    while True:
        folder = pipe.recv()
        Path("/proc/self/clear_refs").write_text("5")
        before, began = peak_nbytes(), time.perf_counter()
        try:
            how, text = run_one(folder)
        except Exception as error:
            how = "unexpected"
            text = f"{type(error).__name__}: {error}: {traceback.extract_tb(error.__traceback__)[-1]}"
        pipe.send((how, text[:400], time.perf_counter() - began, peak_nbytes() - before))


class Runner:
    """One process that runs folders."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, folder: Path) -> tuple[str, str, float, int]:
        self._pipe.send(folder)
        try:
            if self._pipe.poll(60):
                result: tuple[str, str, float, int] = self._pipe.recv()
                return result
            how = "hung", "no end in 60 s", 60.0, 0
        except EOFError:
            how = "died", f"exit code {self._process.exitcode}", 0.0, 0
        self._process.kill()
        self._process.join()
        self._start()
        return how


def make_bases(folder: Path) -> list[Path]:
    """Write the undamaged models: one shard, and several with an index."""
    from dataclasses import replace

    from spile.making.synth import PRESETS, write_checkpoint

    shape = replace(PRESETS["tiny"])
    for name, shards in (("one", 1), ("several", 3)):
        write_checkpoint(folder / name, shape, seed=0, shards=shards)
        (folder / name / "special_tokens_map.json").write_text(
            '{"eos_token": "<|im_end|>", "unk_token": null}'
        )
    return [folder / "one", folder / "several"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the damaged model")
    parser.add_argument("--verbose", action="store_true", help="a line for each folder")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="spile-fuzz-") as temporary:
        os.environ["XDG_CACHE_HOME"] = temporary
        bases = make_bases(Path(temporary))
        runner = Runner()
        usual = {base: runner.run(base) for base in bases * 2}
        assert all(how == "answered" for how, *_ in usual.values()), usual
        report: Callable[[str, int, str, str], None] = lambda *words: print(*words, flush=True)  # noqa: E731
        for seed in range(asked.seed, asked.seed + asked.count):
            rng = random.Random(seed)
            base = rng.choice(bases)
            folder = Path(temporary) / f"m{seed}"
            shutil.copytree(base, folder)
            what = mutate(rng, folder)
            how, text, seconds, nbytes = runner.run(folder)
            counts[how] += 1
            if how == "answered":
                counts["answered as before" if text == usual[base][1] else f"answered otherwise: {what}"] += 1
            if how in ("unexpected", "hung", "died"):
                report(how, seed, what, text)
            if seconds > SLOW_SECONDS:
                counts["slow"] += 1
                report("slow", seed, what, f"{seconds:.1f} s {text[:200]}")
            if nbytes > LARGE_NBYTES:
                counts["large"] += 1
                report("large", seed, what, f"{nbytes / 1e6:.0f} MB {text[:200]}")
            if asked.keep:
                shutil.copytree(folder, asked.keep, dirs_exist_ok=True, symlinks=True)
            if asked.verbose:
                report(how, seed, what, text)
            shutil.rmtree(folder)
    print(json.dumps(dict(sorted(counts.items()))))


if __name__ == "__main__":
    main()
