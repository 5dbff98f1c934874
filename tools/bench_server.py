"""A server and 1, 2, 4, 8 clients at once -> tokens a second of all together, and the process's peak.

    python tools/bench_server.py [--model DIR] [--memory 630MB,auto] [--clients 1,2,4,8] [--tokens 64] [-- FLAGS]

What bounds it: on a machine whose cores one answer already fills, answers at once share what one has; what they can
share for nothing is experts that another's token has just brought into memory. So the sum over all clients should
not fall as clients are added, and each client's rate should fall as 1/n. Each client sends a prompt of its own and
wants `--tokens` tokens; the rate is all their tokens by the time from the first to the last. `spile serve` works on
four at once unless FLAGS say otherwise; the others wait.

Prints one row a run; the last line is JSON, a list of objects with sizes in bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from typing import Any

from served import Served, served
from spile.sizes import format_size

_SENTENCE = "From every spile the sap fell a drop at a time, and number {} was the fullest of them. "


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-sentences", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="after --, for spile serve")
    arguments = parser.parse_args()
    rows = []
    print("{:>8} {:>8} {:>12} {:>14} {:>10} {:>8} {:>10}".format(*_HEADING))
    for memory in arguments.memory.split(","):
        counts = [int(count) for count in arguments.clients.split(",")]
        flags = ["--memory", memory, "--prompt-cache-size", "0", *arguments.flags]
        if arguments.model:
            flags += ["--model", arguments.model]
        with served(flags) as server:
            for count in counts:
                row = {"memory": memory, "clients": count, **_run(server, count, arguments)}
                rows.append(row)
                print(_line(row), flush=True)
    print(json.dumps(rows))


_HEADING = ("memory", "clients", "tok/s in all", "tok/s a client", "first", "hits", "peak")


def _run(server: Served, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    replies: list[Any] = [None] * count

    def ask(index: int) -> None:
        text = "".join(_SENTENCE.format(1 + index + i) for i in range(arguments.prompt_sentences))
        body = {"prompt": text, "max_tokens": arguments.tokens, "temperature": 0}
        status, replies[index] = server.send("/v1/completions", body)
        assert status == 200, replies[index]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    usages = [reply["usage"] for reply in replies]
    took = [usage["spile"] for usage in usages]
    tokens = sum(usage["completion_tokens"] for usage in usages)
    firsts = [one["time_to_first_token_seconds"] for one in took]
    wanted = sum(one["hits"] + one["misses"] for one in took)
    prefill = max(firsts)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / (seconds - min(firsts)) if seconds > min(firsts) else None,
        "client_tokens_per_second": sum(one["tokens_per_second"] or 0 for one in took) / count,
        "first_token_seconds": prefill,
        "hit_rate": sum(one["hits"] for one in took) / wanted if wanted else None,
        "bytes_read": sum(one["bytes_read"] for one in took),
        "peak_bytes": server.usage()["peak_bytes"],
    }


def _line(row: dict[str, Any]) -> str:
    hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
    return (
        f"{row['memory']:>8} {row['clients']:>8} {row['tokens_per_second'] or 0:>12.1f} "
        f"{row['client_tokens_per_second']:>14.1f} {row['first_token_seconds']:>9.1f}s {hits:>8} "
        f"{format_size(row['peak_bytes']):>10}"
    )


if __name__ == "__main__":
    sys.exit(main())
