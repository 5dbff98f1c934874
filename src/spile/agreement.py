"""Logits of two engines -> how far they lie apart, and whether that is rounding.

It reads files of logits that rows of a certificate kept, and knows no engine.

Sizes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spile.verify_row import Configuration

# Both engines compute in float32 or with more digits, in different orders: on the golden and the demo model they
# are within 3e-5 of each other, on a random 20B model 4e-5, at a spread of 2 to 2.7 (2026-11-30). For scale: a
# window off by one, a missing clamp or full instead of half RoPE changes logits by 0.4 to 11, and BF16 activations
# by 1 and 9. A near tie between experts may go either way and show as a few larger differences, more of them the
# larger the model: so a part of the positions may differ by more than TOLERANCE.
TOLERANCE = 0.01  # of the standard deviation of the logits
UNLIKE = 0.05  # of the positions


@dataclass(frozen=True)
class Agreement:
    """How far two engines' logits lie apart, at the positions of the fixed text."""

    first: str
    second: str
    largest: float  # difference of any logit
    typical: float  # the median over positions of the largest difference
    spread: float  # standard deviation of the first's logits
    num_within: int  # positions at which no logit differs by more than TOLERANCE times the spread
    num_same_choice: int  # positions at which both have the same likeliest token
    num_positions: int
    is_judged: bool  # False: said for information, as the engines run by default

    @property
    def ok(self) -> bool:
        return not self.is_judged or self.num_within >= (1 - UNLIKE) * self.num_positions

    def __str__(self) -> str:
        text = (
            f"{self.first} and {self.second}: largest difference {self.largest:.1e}, typically {self.typical:.1e} "
            f"(logits spread by {self.spread:.2g}), same choice at {self.num_same_choice} of {self.num_positions} "
            "positions"
        )
        return text if self.ok else f"{text}: TOO FAR APART"


def compare(kept: Mapping[Configuration, Path], vocab_size: int) -> list[Agreement]:
    """Compare what pairs of rows, one of each engine, kept of their logits; nothing where one could not run."""
    pairs = list(kept.items())
    found = []
    for (one, first), (other, second) in zip(pairs[::2], pairs[1::2], strict=True):
        if not (first.exists() and second.exists()):
            continue
        a, b = (np.memmap(path, np.float32, "r").reshape(-1, vocab_size) for path in (first, second))
        spread, largest, same = float(np.std(a)), np.zeros(len(a)), 0
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            largest[n] = np.abs(x - y).max()
            same += int(np.argmax(x) == np.argmax(y))
        found.append(
            Agreement(
                _describe(one), _describe(other), float(largest.max()), float(np.median(largest)), spread,
                int((largest <= TOLERANCE * spread).sum()), same, len(a), one.is_precise,
            )
        )  # fmt: skip
    return found


def _describe(configuration: Configuration) -> str:
    return f"{configuration.engine} ({'all digits' if configuration.is_precise else 'by default'})"
