"""The device that mlx runs on -> what streaming costs on it, apart from any model: a table, and JSON.

    python tools/bench_mlx.py [--layers 24] [--experts 256] [--slots 64]

What bounds a streamed token on a GPU: a layer's router has to be read back before its experts can be chosen, so
each layer waits for the device once (`sync`); the experts that miss are copied into slots that the device reads
(`write`); the experts are multiplied (`expert layer`), at the shape of a Maple's: 2 bits in groups of 128, width
2048 and 512. A resident model pays only the last. `seen` says whether the device read what was written through
NumPy; where it says no, nothing that spile does on this device is to be trusted.

Prints a row a measurement; the last line is JSON, times in seconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

_WIDTH, _INNER, _BITS, _GROUP, _CHOSEN = 2048, 512, 2, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    arguments = parser.parse_args()
    bank = _bank(arguments.slots)
    found: dict[str, Any] = {"device": str(mx.default_device()), "mlx": mx.__version__}
    found["sync"] = _sync(arguments.experts)
    found["write"], found["expert_bytes"], found["seen"] = _write(bank)
    found["expert_layer"] = _seconds(lambda: _expert_layer(bank, arguments.slots))
    found["expert_layer_64_tokens"] = _seconds(lambda: _expert_layer(bank, arguments.slots, 64))
    waits = arguments.layers * found["sync"]
    print(f"device               {found['device']}, mlx {found['mlx']}")
    print(f"sync                 {found['sync'] * 1e3:8.3f} ms a layer, {waits * 1e3:.1f} ms a token")
    rate = found["expert_bytes"] / found["write"]
    print(f"write                {found['write'] * 1e3:8.3f} ms an expert, {rate / 1e9:.1f} GB/s")
    print(f"seen                 {'yes' if found['seen'] else 'NO'}")
    print(f"expert layer         {found['expert_layer'] * 1e3:8.3f} ms for a token")
    print(f"                     {found['expert_layer_64_tokens'] * 1e3:8.3f} ms for 64")
    print(json.dumps(found))


def _seconds(work: Callable[[], object], repeats: int = 30) -> float:
    """Return the median time of some work, after a first that is not counted; a second of it is enough."""
    work()
    times: list[float] = []
    while len(times) < repeats and sum(times) < 1:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _sync(num_experts: int) -> float:
    """Time to choose experts and read the choice, beyond the time to compute it a hundred times in one go."""
    logits = mx.random.normal((1, num_experts))

    def choose(x: Any) -> Any:
        return mx.argpartition(-x, kth=_CHOSEN - 1, axis=-1)[..., :_CHOSEN]

    def chain() -> None:
        x = logits
        for _ in range(100):
            x = logits + 0 * choose(x).sum()
        mx.eval(x)

    alone = _seconds(lambda: np.array(choose(logits + 0)))
    return max(0.0, alone - _seconds(chain, 5) / 100)


def _bank(num_slots: int) -> list[tuple[Any, Any, Any]]:
    """Make gate, up and down of so many slots."""
    bank = []
    for rows, width in ((_INNER, _WIDTH), (_INNER, _WIDTH), (_WIDTH, _INNER)):
        codes = mx.random.randint(0, 2**32 - 1, (num_slots, rows, width * _BITS // 32), mx.uint32)
        factors = [mx.ones((num_slots, rows, width // _GROUP), mx.bfloat16) * f for f in (0.02, -0.02)]
        mx.eval(codes, factors)
        bank.append((codes, *factors))
    return bank


def _write(bank: list[tuple[Any, Any, Any]]) -> tuple[float, int, bool]:
    """Time to copy one expert's codes into a slot; their bytes; whether the device sees them."""
    views = [np.array(codes, copy=False) for codes, _, _ in bank]
    new = [np.full_like(view[0], 0x55555555) for view in views]

    def copy() -> None:
        for view, data in zip(views, new, strict=True):
            view[1] = data

    seconds = _seconds(copy)
    seen = all(bool(mx.all(codes[1] == 0x55555555)) for codes, _, _ in bank)
    return seconds, sum(data.nbytes for data in new), seen


def _expert_layer(bank: list[tuple[Any, Any, Any]], num_slots: int, num_tokens: int = 1) -> None:
    x = mx.ones((num_tokens, 1, 1, _WIDTH), mx.bfloat16)
    ids = mx.array(np.arange(num_tokens * _CHOSEN).reshape(num_tokens, _CHOSEN) % num_slots)

    def product(x: Any, part: tuple[Any, Any, Any]) -> Any:
        return mx.gather_qmm(x, *part, rhs_indices=ids, transpose=True, group_size=_GROUP, bits=_BITS)

    gate, up, down = bank
    mx.eval(product(product(x, gate) * product(x, up), down))


if __name__ == "__main__":
    main()
