"""A model, a budget and many hostile requests at once -> whether the server lived, and what it was charged, as a table.

    python tools/stress_server.py MODEL [--budgets 300MB,630MB,1GB] [--kinds lists,tiny_messages] [--at-once 40]

What bounds it: `spile serve` runs in a control group whose hard limit is its budget (needs root and Linux), so one byte
over it is a kill. Each kind of body grows when it is read: forty of them come at once, each just under the largest body
that is taken, and between them ordinary requests whose answers have to be those given alone.

Prints one row a kind and budget; the last line is JSON, a list of objects with sizes in bytes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from served import Served, served
from spile.server.intake import TASK_NBYTES, Limits, cost_nbytes
from spile.sizes import format_size, parse_size

Bodies = Callable[[int], tuple[str, bytes]]  # about so many bytes -> path and body
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ORDINARY = {"prompt": "Why does sap run in spring?", "max_tokens": 3, "temperature": 0}
_ORDINARY_TRIES = 40


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **more}


def _filled(make: Callable[[str], dict[str, Any]], piece: str, nbytes: int, join: str = ",") -> bytes:
    """Return a body whose hole holds as many pieces as there is room for."""
    before, after = json.dumps(make("@@"), separators=(",", ":")).split('"@@"')
    count = (nbytes - len(before) - len(after) - 16) // (len(piece) + len(join))
    pieces = join.join([piece] * count)
    return f"{before}{pieces}{after}".encode()


def _numbered(make: Callable[[str], dict[str, Any]], piece: str, nbytes: int) -> bytes:
    """Likewise, each piece with a number of its own."""
    before, after = json.dumps(make("@@"), separators=(",", ":")).split('"@@"')
    room, pieces, number = nbytes - len(before) - len(after) - 16, [], 0
    while room > 0:
        pieces.append(piece.replace("#", str(number)))
        room -= len(pieces[-1]) + 1
        number += 1
    return f"{before}{','.join(pieces[:-1])}{after}".encode()


def _in(kind: str, hole: Any) -> dict[str, Any]:
    if kind == "kwargs":
        return _chat(chat_template_kwargs={"a": hole})
    if kind == "metadata":
        return _chat(metadata={"a": hole})
    if kind == "tool":
        function = {"name": "f", "parameters": {"type": "object", "x": hole}}
        return _chat(tools=[{"type": "function", "function": function}])
    schema = {"name": "s", "schema": {"type": "object", "x": hole}}
    return _chat(response_format={"type": "json_schema", "json_schema": schema})


def _lists(where: str) -> Bodies:
    return lambda n: (CHAT, _filled(lambda hole: _in(where, [hole]), "[]", n))


_PROPERTIES = '{"type":"object","properties":{"a":{"type":"string"}}}'
_TOOL = f'{{"type":"function","function":{{"name":"f#","parameters":{_PROPERTIES}}}}}'
KINDS: dict[str, Bodies] = {
    "lists": _lists("kwargs"),
    "lists_tool": _lists("tool"),
    "lists_metadata": _lists("metadata"),
    "lists_schema": _lists("schema"),
    "objects": lambda n: (CHAT, _filled(lambda hole: _in("kwargs", [hole]), "{}", n)),
    "floats": lambda n: (CHAT, _filled(lambda hole: _in("kwargs", [hole]), "1.5", n)),
    "small_keys": lambda n: (
        CHAT,
        json.dumps(_in("kwargs", {f"{number:x}": 0 for number in range(n // 9)}), separators=(",", ":")).encode(),
    ),
    "tiny_messages": lambda n: (
        CHAT, _filled(lambda hole: {"max_tokens": 1, "messages": [hole]}, '{"role":"user","content":"x"}', n)),
    "tiny_parts": lambda n: (
        CHAT,
        _filled(lambda hole: {"max_tokens": 1, "messages": [{"role": "user", "content": [hole]}]}, '""', n)),
    "ids": lambda n: (COMPLETIONS, _filled(lambda hole: {"max_tokens": 1, "prompt": [hole]}, "777", n)),
    "id_lists": lambda n: (COMPLETIONS, _filled(lambda hole: {"max_tokens": 1, "prompt": [hole]}, "[7]", n)),
    "tools": lambda n: (CHAT, _numbered(lambda hole: _chat(tools=[hole]), _TOOL, n)),
    "bias": lambda n: (COMPLETIONS, _bias(n)),
    "stops": lambda n: (COMPLETIONS, _filled(lambda hole: {"prompt": "x", "stop": [hole]}, '"ab"', n)),
    "deep": lambda n: (CHAT, b'{"messages":' + b"[" * (n // 2) + b"]" * (n // 2 - 20) + b"}"),
    "text": lambda n: (CHAT, _text(n, "", "ab ")),
    "wide_text": lambda n: (CHAT, _text(n, "\N{GRINNING FACE}", "ab ")),
    "short_text": lambda n: (CHAT, _text(n // 8, "", "1")),
    "tokenize": lambda n: ("/tokenize", json.dumps({"prompt": "7" * (n - 20)}).encode()),
    "tokenize_half": lambda n: ("/tokenize", json.dumps({"prompt": "7" * (n // 2)}).encode()),
    "detokenize": lambda n: ("/detokenize", _filled(lambda hole: {"tokens": [hole]}, "7", n)),
    "logprobs": lambda _: (
        COMPLETIONS, json.dumps({"prompt": "x", "logprobs": 20, "n": 2, "max_tokens": 4}).encode()),
    "schema": lambda _: (CHAT, json.dumps(_schema(400)).encode()),
    "schema_one": lambda _: (CHAT, json.dumps({**_schema(400), "n": 1, "max_tokens": 20}).encode()),
    "required": lambda n: (
        CHAT, _numbered(lambda hole: _chat(tools=[hole], tool_choice="required"), _TOOL, n // 20)),
}  # fmt: skip


def _text(n: int, first: str, piece: str) -> bytes:
    text = first + piece * ((n - 200) // len(piece))
    return json.dumps(_chat(messages=[{"role": "user", "content": text}]), ensure_ascii=False).encode()


def _schema(num: int) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for number in range(num)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return _chat(n=8, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def _bias(n: int) -> bytes:
    pairs = {str(number): 1 for number in range(n // 9)}
    return json.dumps({"prompt": "x", "max_tokens": 1, "logit_bias": pairs}, separators=(",", ":")).encode()


OPEN = ("held", "slow", "unread")  # uploads and replies that stay open
FITS = "_fits"  # with this, a body that is as large as is taken
# Those of which few are taken at the largest size come once more.
KINDS_BY_DEFAULT = (
    *KINDS,
    *(
        f"{kind}{FITS}"
        for kind in ("lists", "lists_schema", "small_keys", "tiny_messages", "tiny_parts", "ids")
    ),
    *(f"{kind}{FITS}" for kind in ("tools", "bias", "wide_text", "tokenize", "detokenize")),
    *OPEN,
)


class Answers:
    """What came back, of all kinds."""

    def __init__(self) -> None:
        self.hostile: Counter[str] = Counter()
        self.ordinary: Counter[str] = Counter()


def _post(port: int, path: str, body: bytes, seconds: float = 300) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def _hostile(server: Served, path: str, body: bytes, answers: Answers) -> None:
    try:
        status, _ = _post(server.port, path, body)
        answers.hostile[str(status)] += 1
    except (OSError, http.client.HTTPException):
        answers.hostile["closed"] += 1


def _unread(server: Served, answers: Answers, end: threading.Event) -> None:
    """Ask for a long reply, and read nothing of it."""
    body = json.dumps({"prompt": "7" * 200_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    try:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head + body)
            end.wait(60)
            answers.hostile["unread"] += 1
    except OSError:
        answers.hostile["closed"] += 1


def _upload(server: Served, nbytes: int, seconds: float, answers: Answers, end: threading.Event) -> None:
    """Send half of a body and hold it open; with `seconds`, a piece so often."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {nbytes}\r\n\r\n".encode()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head)
            connection.setblocking(False)
            left = nbytes - 10
            while not end.is_set():
                with suppress(BlockingIOError):
                    left -= connection.send(b" " * min(left, 1000 if seconds else 1 << 20))
                try:
                    if data := connection.recv(4096):
                        answers.hostile[data.split(b" ", 2)[1].decode()] += 1
                    return
                except BlockingIOError:
                    end.wait(seconds or 0.05)
            answers.hostile["held"] += 1
    except OSError:
        answers.hostile["closed"] += 1


def _ordinary(server: Served, wanted: str, answers: Answers, tries: int) -> None:
    body = json.dumps(ORDINARY).encode()
    for _ in range(tries):
        try:
            status, data = _post(server.port, COMPLETIONS, body)
        except (OSError, http.client.HTTPException):
            answers.ordinary["closed"] += 1
            if server.process.poll() is not None:
                return
            continue
        if status == 200 and json.loads(data)["choices"][0]["text"] != wanted:
            answers.ordinary["other"] += 1
        else:
            answers.ordinary[str(status)] += 1
        if status == 200:
            return
        time.sleep(random.uniform(0.3, 1.0))


def measure(server: Served, budget: str, kind: str, at_once: int, wanted: str) -> dict[str, Any]:
    """Run one kind against a server."""
    limits = Limits.of(parse_size(budget))
    body_nbytes = limits.body_nbytes - 100
    answers, end = Answers(), threading.Event()
    started = time.monotonic()
    server.forget_charged()
    before = server.charged_bytes()
    if kind == "unread":
        threads = [threading.Thread(target=_unread, args=(server, answers, end)) for _ in range(100)]
    elif kind in ("held", "slow"):
        seconds = 0.2 if kind == "slow" else 0.0
        threads = [
            threading.Thread(target=_upload, args=(server, body_nbytes, seconds, answers, end))
            for _ in range(250)
        ]
    else:
        path, body = KINDS[kind.removesuffix(FITS)](body_nbytes)
        if kind.endswith(FITS):
            most = limits.request_nbytes - TASK_NBYTES - 1_500_000  # for its answer
            while cost_nbytes(bytearray(body)) > most:
                body_nbytes = int(body_nbytes * min(0.97, most / cost_nbytes(bytearray(body))))
                path, body = KINDS[kind.removesuffix(FITS)](body_nbytes)
        threads = [
            threading.Thread(target=_hostile, args=(server, path, body, answers)) for _ in range(at_once)
        ]
    ordinary = [
        threading.Thread(target=_ordinary, args=(server, wanted, answers, _ORDINARY_TRIES)) for _ in range(3)
    ]
    for index, thread in enumerate(threads):
        thread.start()
        if index % (len(threads) // 3) == 1 and index // (len(threads) // 3) < 3:
            ordinary[index // (len(threads) // 3)].start()
    for thread in ordinary:
        thread.join()
    if kind in OPEN:
        end.wait(10)
    end.set()
    for thread in threads:
        thread.join()
    alive = server.process.poll() is None
    return {
        "budget": budget,
        "kind": kind,
        "killed": not alive,
        "before_bytes": before,
        "charged_bytes": server.charged_bytes(),
        "resident_bytes": server.usage()["resident_bytes"] if alive else None,
        "hostile": dict(answers.hostile),
        "ordinary": dict(answers.ordinary),
        "seconds": round(time.monotonic() - started, 1),
    }


def rows_of(model: str, budget: str, kinds: list[str], at_once: int) -> Iterator[dict[str, Any]]:
    """Run all kinds against one server, and against another where it is killed."""
    limit, left = parse_size(budget), list(kinds)
    # A short context and no kept prompts: room for keys and values lies idle here, and would hide what is too much.
    flags = [*([model] if model else []), "--memory", budget, "--context", "512", "--prompt-cache-size", "0"]
    while left:
        with served(flags, group_bytes=limit) as server:
            # Ids from all over the vocabulary: the pool is full before anything comes.
            filling = {"prompt": [random.randrange(1000, 100_000) for _ in range(300)], "max_tokens": 1}
            _post(server.port, COMPLETIONS, json.dumps(filling).encode())
            answer = json.loads(_post(server.port, COMPLETIONS, json.dumps(ORDINARY).encode())[1])
            wanted = answer["choices"][0]["text"]
            while left:
                row = measure(server, budget, left.pop(0), at_once, wanted)
                yield row
                if row["killed"]:
                    break


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--budgets", default="300MB,630MB,1GB")
    parser.add_argument("--kinds", default=",".join(KINDS_BY_DEFAULT))
    parser.add_argument("--at-once", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    names = ("budget", "kind", "killed", "before", "charged", "VmRSS", "s")
    print("{:>7} {:>17} {:>6} {:>8} {:>8} {:>8} {:>5}  hostile | ordinary".format(*names), flush=True)
    for budget in arguments.budgets.split(","):
        for row in rows_of(arguments.model, budget, arguments.kinds.split(","), arguments.at_once):
            rows.append(row)
            resident = format_size(row["resident_bytes"]) if row["resident_bytes"] else "-"
            print(
                f"{budget:>7} {row['kind']:>17} {'KILLED' if row['killed'] else 'no':>6} "
                f"{format_size(row['before_bytes']):>8} {format_size(row['charged_bytes']):>8} {resident:>8} "
                f"{row['seconds']:>5}  "
                f"{row['hostile']} | {row['ordinary']}",
                flush=True,
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
