"""A server, many clients and some minutes -> whether every answer was right, and what the process took.

    python tools/soak.py [--model DIR] [--memory 630MB] [--group 700MB] [--minutes 30] [--clients 8] [-- FLAGS]

First each of some requests (long and short prompts, chat and completions, greedy and by seed, with and without
log-probabilities) is answered alone. Then the clients send them in random order, all at once: a third streamed,
some given up half-way. Each whole answer must be the one given alone, to the letter. Memory, threads and open
files are watched; the slope of memory is over the second half, a request. FLAGS go to `spile serve`; --group is
the hard limit of a control group, which needs root.

Prints a line every half minute; the last line is JSON. Exit code 1 where an answer was wrong or failed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
import time
from typing import Any

from served import Served, served
from spile.sizes import format_size, parse_size

_WORDS = [
    "the",
    "sap",
    "of",
    "a",
    "maple",
    "runs",
    "in",
    "spring",
    "when",
    "cold",
    "nights",
    "follow",
    "warm",
    "days",
    "and",
    "children",
    "play",
    "in",
    "snow",
]
_ABORTED, _STREAMED = 0.1, 0.33
_SAMPLE_SECONDS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--memory")
    parser.add_argument("--group", type=parse_size)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument(
        "--prompt-tokens", type=int, help="of the longest; default: 0.6 of the context, to 2,000"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    flags = [*arguments.flags]
    for name in ("model", "memory"):
        if getattr(arguments, name):
            flags += [f"--{name}", getattr(arguments, name)]
    with served(flags, group_bytes=arguments.group) as server:
        result = Soak(server, arguments).run()
    result["exit_code"] = server.exit_code
    print(json.dumps(result))
    return 0 if result["wrong"] == result["failed"] == server.exit_code == 0 else 1


class Soak:
    """What is asked, what the right answers are, and what came of it."""

    def __init__(self, server: Served, arguments: argparse.Namespace) -> None:
        self.server = server
        self.arguments = arguments
        context = server.send("/status")[1]["context"]
        longest = arguments.prompt_tokens or min(int(0.6 * context), 2000)
        rng = random.Random(arguments.seed)
        self.requests = [_request(rng, longest) for _ in range(arguments.requests)]
        self.wanted: list[str] = []
        self.counts = dict.fromkeys(("right", "wrong", "aborted", "refused", "failed"), 0)
        self.examples: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.ends = 0.0

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        for path, body in self.requests:
            status, reply = self.server.send(path, body)
            assert status == 200, reply
            self.wanted.append(json.dumps(reply["choices"], sort_keys=True))
        alone_seconds = time.monotonic() - started
        print(f"{len(self.requests)} requests alone: {alone_seconds:.1f} s", file=sys.stderr, flush=True)
        self.ends = time.monotonic() + 60 * self.arguments.minutes
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self.arguments.clients)]
        for thread in threads:
            thread.start()
        told = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(_SAMPLE_SECONDS)
            done = sum(self.counts.values())
            self.samples.append({"done": done, **self.server.usage()})
            if time.monotonic() - told > 30:
                told = time.monotonic()
                resident = format_size(self.samples[-1]["resident_bytes"])
                print(f"{self.counts}, {resident}", file=sys.stderr, flush=True)
        return self._result(alone_seconds)

    def _client(self, number: int) -> None:
        rng = random.Random(1000 * self.arguments.seed + number)
        while time.monotonic() < self.ends:
            index = rng.randrange(len(self.requests))
            path, body = self.requests[index]
            chance = rng.random()
            try:
                if chance < _ABORTED:
                    self._abort(path, body, rng.randrange(1, 6))
                    outcome = "aborted"
                elif chance < _ABORTED + _STREAMED:
                    outcome = self._compare(index, self._streamed(path, body))
                else:
                    status, reply = self.server.send(path, body)
                    outcome = "refused" if status == 429 else "failed"
                    if status == 200:
                        outcome = self._compare(index, reply["choices"])
                    elif status != 429:
                        self._note(f"{status}: {reply}")
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                outcome = "failed"
                self._note(repr(error))
            with self.lock:
                self.counts[outcome] += 1
            if outcome == "refused":
                time.sleep(0.2)

    def _compare(self, index: int, choices: list[Any]) -> str:
        found = json.dumps(choices, sort_keys=True)
        if found == self.wanted[index]:
            return "right"
        self._note(f"wanted {self.wanted[index]}, got {found}")
        return "wrong"

    def _note(self, what: str) -> None:
        with self.lock:
            if len(self.examples) < 5:
                self.examples.append(what[:2000])

    def _open(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=600)
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        return connection

    def _abort(self, path: str, body: dict[str, Any], num_lines: int) -> None:
        connection = self._open(path, body)
        try:
            reply = connection.getresponse()
            for _ in range(num_lines):
                reply.readline()
        finally:
            connection.close()

    def _streamed(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the choices of a stream, joined as those of a whole answer are."""
        connection = self._open(path, body)
        try:
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {reply.read()!r}")
            lines = reply.read().decode().splitlines()
        finally:
            connection.close()
        frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if "data: [DONE]" not in lines:
            raise ValueError(f"the stream ended early: {lines[-3:]}")
        return [_joined([frame["choices"][0] for frame in frames], is_chat="chat" in path)]

    def _result(self, alone_seconds: float) -> dict[str, Any]:
        half = self.samples[len(self.samples) // 2 :]
        xs, ys = [s["done"] for s in half], [s["resident_bytes"] for s in half]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - mean_x) ** 2 for x in xs)
        slope = (
            sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
        )
        status = self.server.send("/status")[1]
        return {
            **self.counts,
            "minutes": self.arguments.minutes,
            "clients": self.arguments.clients,
            "alone_seconds": round(alone_seconds, 1),
            "slope_bytes_per_request": round(slope),
            "resident_bytes": [self.samples[0]["resident_bytes"], self.samples[-1]["resident_bytes"]],
            "peak_bytes": self.samples[-1]["peak_bytes"],
            "charged_bytes": self.server.charged_bytes(),
            "threads": [min(s["threads"] for s in half), max(s["threads"] for s in half)],
            "files": [min(s["files"] for s in half), max(s["files"] for s in half)],
            "hit_rate": status["hit_rate"],
            "bytes_read": status["bytes_read"],
            "summary": status["summary"],
            "examples": self.examples,
        }


def _request(rng: random.Random, longest: int) -> tuple[str, dict[str, Any]]:
    num_words = max(1, int(longest * 0.5 * rng.random() ** 3))
    text = " ".join(rng.choice(_WORDS) for _ in range(num_words))
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 16, 48)), "seed": rng.randrange(1000)}
    body["temperature"] = rng.choice((0, 0.8, 1.5))
    if rng.random() < 0.25:
        body["stop"] = [" the", "."]
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text}
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 2}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


def _joined(choices: list[Any], *, is_chat: bool) -> dict[str, Any]:
    """Join the deltas of one answer in the shape of a whole one."""
    joined: dict[str, Any] = {"index": 0, "finish_reason": choices[-1]["finish_reason"], "logprobs": None}
    if not is_chat:
        return {**joined, "text": "".join(choice["text"] for choice in choices)}
    deltas = [choice["delta"] for choice in choices]
    message: dict[str, Any] = {"role": "assistant", "refusal": None}
    message["content"] = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    logprobs = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    if logprobs:
        joined["logprobs"] = {"content": logprobs, "refusal": None}
    return {**joined, "message": message}


if __name__ == "__main__":
    sys.exit(main())
