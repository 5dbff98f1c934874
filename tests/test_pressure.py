"""The budget is the process's, whatever is asked of it and whatever happens to it: sampled from outside the
engine, in a process of its own (tests/pressure.py).
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spile.making.synth import SynthShape, write_checkpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

PROGRAM = Path(__file__).with_name("pressure.py")
# 64 MB of experts, in 256 of 258 kB; the rest is small.
SHAPE = SynthShape(
    hidden_size=512,
    num_hidden_layers=4,
    num_experts=64,
    num_experts_per_tok=2,
    moe_intermediate_size=640,
    sliding_window=64,
    vocab_size=323,
    max_position_embeddings=1024,
)
BUDGET = 88_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pressure") / "model"
    write_checkpoint(folder, SHAPE, seed=3)
    return folder


def start(folder: Path, budget: int | str, scenario: str, group: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(folder), str(budget), scenario]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result_of(process: subprocess.Popen[str], told: str = "") -> dict[str, Any]:
    out, err = process.communicate(told, timeout=60)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(result)
    return result


def ran(folder: Path, budget: int | str, scenario: str) -> dict[str, Any]:
    return result_of(start(folder, budget, scenario), "\n")


def check_kept(result: dict[str, Any], budget: int) -> None:
    assert result["VmHWM"] <= budget
    assert result["RssAnon"] <= budget
    assert result["VmSwap"] == 0
    assert result["experts_over_plan"] <= 0


def test_closed_model_gives_its_memory_back(folder: Path) -> None:
    result = ran(folder, BUDGET, "closed")
    for full, after in zip(result["full"], result["after"], strict=True):
        assert full - after > 40_000_000, "a pool of 64 MB"
    assert max(result["after"]) - min(result["after"]) < 5_000_000


def test_prompts_with_other_experts_each_stay_in_the_budget_and_exact(folder: Path) -> None:
    """Elsewhere a second prompt doubled what was resident."""
    result = ran(folder, BUDGET, "disjoint")
    check_kept(result, BUDGET)
    assert min(result["asked"]) >= 16
    assert result["common"] <= 4
    assert "experts resident" in result["summary"]
    assert result["answers"] == ran(folder, "all", "disjoint")["answers"]


def test_pool_that_shrinks_in_the_middle_of_an_answer_gives_memory_back_and_changes_nothing(
    folder: Path,
) -> None:
    result = ran(folder, BUDGET, "resized")
    check_kept(result, BUDGET)
    full, shrunk, small, grown = result["anonymous"]
    assert full - shrunk >= 0.9 * result["to_free"] > 4_000_000
    assert small <= shrunk + 4_000_000  # it does not fill up again
    assert grown <= full
    assert result["ids"] == ran(folder, "all", "waiting")["ids"]


def test_second_run_reads_nothing_from_the_disk_where_memory_is_free(folder: Path) -> None:
    """Elsewhere pages were dropped after each read, and every miss came from the disk."""
    ran(folder, BUDGET, "disjoint")
    second = ran(folder, BUDGET, "disjoint")
    assert "reads buffered" in second["summary"]
    assert second["from_disk"] <= 1_000_000
    assert second["VmSwap"] == 0


# -- control groups --


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of our own that limits memory; skips where none can be made."""
    version1 = Path("/sys/fs/cgroup/memory")
    parent = version1 if version1.is_dir() else Path("/sys/fs/cgroup")
    path = parent / f"spile-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    try:
        if not _limit_file(path).exists():
            pytest.skip("control groups do not limit memory here")
        yield path
    finally:
        path.rmdir()


def _limit_file(group: Path) -> Path:
    version2 = group / "memory.max"
    return version2 if version2.exists() else group / "memory.limit_in_bytes"


def num_kills(group: Path) -> int:
    version2 = group / "memory.events"
    path = version2 if version2.exists() else group / "memory.oom_control"
    return next(
        int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill ")
    )


def test_limit_that_is_lowered_to_the_budget_in_the_middle_of_an_answer_kills_nothing(
    folder: Path, group: Path
) -> None:
    """The page cache that the group held goes; the answer does not change."""
    _limit_file(group).write_text(str(4 * BUDGET))
    process = start(folder, BUDGET, "waiting", group)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    _limit_file(group).write_text(str(BUDGET))
    result = result_of(process, "\n")
    assert num_kills(group) == 0
    check_kept(result, BUDGET)
    assert result["ids"] == ran(folder, "all", "waiting")["ids"]


def test_memory_taken_by_others_in_the_group_kills_nothing(folder: Path, group: Path) -> None:
    """Another process fills what the budget leaves of the group's limit, and the file cache has to go."""
    other_nbytes = 100_000_000
    _limit_file(group).write_text(str(BUDGET + other_nbytes + 30_000_000))
    process = start(folder, BUDGET, "waiting", group)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    hog = subprocess.Popen(
        ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), sys.executable, "-c",
         f"data = bytearray(b'1') * {other_nbytes}; print('full', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert hog.stdout is not None
    assert hog.stdout.readline() == "full\n"
    result = result_of(process, "\n")
    hog.communicate("\n", timeout=20)
    assert num_kills(group) == 0
    check_kept(result, BUDGET)
    assert result["ids"] == ran(folder, "all", "waiting")["ids"]


def test_group_that_is_smaller_than_the_floor_is_told_in_one_sentence_before_anything_is_loaded(
    folder: Path, group: Path
) -> None:
    limit = 40_000_000
    _limit_file(group).write_text(str(limit))
    process = start(folder, BUDGET, "waiting", group)
    _, err = process.communicate("\n", timeout=60)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("spile.errors.BudgetError:")
    assert "the control group, which allows 40.0 MB, leaves" in last
    assert num_kills(group) == 0


def test_budget_beyond_what_the_group_allows_is_refused_with_one_that_fits(folder: Path, group: Path) -> None:
    _limit_file(group).write_text("60000000")
    process = start(folder, BUDGET, "waiting", group)
    _, err = process.communicate("\n", timeout=60)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert "the budget of 88.0 MB takes" in last
    assert num_kills(group) == 0


# -- a server in a group whose limit is its budget --

SERVER_BUDGET = 170_000_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ORDINARY = {"prompt": [3, 150, 200], "max_tokens": 4, "temperature": 0}


def _body(before: str, piece: str, after: str, nbytes: int = 490_000) -> bytes:
    """Return a body with as many pieces as there is room for, each with a number in place of #."""
    count = (nbytes - len(before) - len(after)) // (len(piece) + (7 if "#" in piece else 1))
    return (before + ",".join(piece.replace("#", str(number)) for number in range(count)) + after).encode()


_ONE = '{"messages":[{"role":"user","content":"x"}],'
HOSTILE = [
    (CHAT, _body(_ONE + '"chat_template_kwargs":{"a":[', "[]", "]}}")),
    (CHAT, _body(_ONE + '"chat_template_kwargs":{"a":[', "[]", "]}}", 80_000)),
    (CHAT, _body(_ONE + '"metadata":{"a":[', "[{}]", "]}}")),
    (CHAT, _body(_ONE + '"metadata":{', '"#":0', "}}", 200_000)),
    (CHAT, _body(_ONE + '"tools":[{"type":"function","function":{"name":"f","parameters":{"a":[', "[]", "]}}}]}")),
    (CHAT, _body(_ONE + '"tools":[', '{"type":"function","function":{"name":"f#"}}', "]}")),
    (CHAT, _body(_ONE + '"response_format":{"type":"json_schema","json_schema":{"schema":{"a":[', "[]", "]}}}}")),
    (CHAT, _body('{"messages":[', '{"role":"user","content":"x"}', "]}")),
    (CHAT, _body('{"messages":[{"role":"user","content":[', '""', "]}]}")),
    (CHAT, b'{"messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    (CHAT, _body('{"messages":[{"role":"user","content":"', "ab c", '"}]}')),
    (COMPLETIONS, _body('{"prompt":[', "77", "]}")),
    (COMPLETIONS, _body('{"prompt":[', "77", "]}", 150_000)),
    (COMPLETIONS, _body('{"prompt":[', "[7]", "]}")),
    (COMPLETIONS, _body('{"prompt":[1],"stop":[', '"ab"', "]}")),
    (COMPLETIONS, _body('{"prompt":[1],"logit_bias":{', '"#":1', "}}")),
    (COMPLETIONS, json.dumps({"prompt": [1], "n": 16, "logprobs": 20, "max_tokens": 2}).encode()),
    ("/tokenize", _body('{"prompt":"', "ab c", '"}')),
    ("/detokenize", _body('{"tokens":[', "77", "]}")),
]  # fmt: skip


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@contextmanager
def serving(folder: Path, group: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server in the group, once it is ready: its port."""
    command = [sys.executable, "-m", "spile", "serve", str(folder), "--port", "0", "--prompt-cache-size", "0"]
    command += ["--memory", str(SERVER_BUDGET), "--threads", "1", "--context", "512"]
    process = subprocess.Popen(
        ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if line.startswith("listening"):
                port = int(line.split(",")[0].rsplit(":", 1)[1])
            if line.startswith("ready"):
                break
        reader = threading.Thread(target=process.stderr.read)  # so that it never waits for us
        reader.start()
        yield port, process
    finally:
        process.terminate()
        process.wait(30)
        reader.join()
        process.stderr.close()


def test_whatever_is_sent_to_a_server_its_budget_holds_and_others_are_answered(
    folder: Path, group: Path
) -> None:
    """Once: four requests of a megabyte of empty lists, each 25 times that when read, and the process was killed."""
    _limit_file(group).write_text(str(SERVER_BUDGET))
    with serving(folder, group) as (port, process):
        post(port, COMPLETIONS, json.dumps({"prompt": list(range(300)), "max_tokens": 1}).encode())
        ordinary = json.dumps(ORDINARY).encode()
        wanted = json.loads(post(port, COMPLETIONS, ordinary)[1])["choices"]
        heads = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 490000\r\n\r\n"
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        for connection in connections:  # uploads that are never done
            connection.setblocking(False)
            connection.send(heads + b" " * 200_000)
        statuses: Counter[int] = Counter()

        def send(path: str, body: bytes) -> None:
            try:
                statuses[post(port, path, body)[0]] += 1
            except OSError:  # closed for a newer one
                statuses[0] += 1

        for path, body in HOSTILE:
            threads = [threading.Thread(target=send, args=(path, body)) for _ in range(10)]
            for thread in threads:
                thread.start()
            for _ in range(20):
                status, data = post(port, COMPLETIONS, ordinary)
                if status == 200:
                    break
                assert status == 429
                time.sleep(0.2)
            assert status == 200
            assert json.loads(data)["choices"] == wanted
            for thread in threads:
                thread.join()
            assert process.poll() is None
        for connection in connections:
            connection.close()
        print(dict(statuses))
        assert set(statuses) <= {0, 200, 400, 413, 429}
    assert num_kills(group) == 0
