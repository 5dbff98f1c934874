"""Turns a bound on an answer's reasoning into a rule for its next token: at the bound the end marker is written.

It does not know logits or templates. It stands around the rule of the answer itself, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spile.generation.generate import Constraint
from spile.text.reasoning import ReasoningSplitter
from spile.text.tokenizer import Decoder


class ThinkingLimit:
    """Closes the reasoning of one answer after `budget` tokens. Satisfies `spile.generation.generate.Constraint`.

    `closing` are the ids of the end marker and what stands between it and an answer.
    """

    def __init__(
        self,
        inner: Constraint | None,
        decoder: Decoder,
        splitter: ReasoningSplitter,
        closing: Sequence[int],
        budget: int,
    ) -> None:
        self._inner = inner
        self._decoder = decoder
        self._splitter = splitter
        self._closing = list(closing)
        self._left = budget
        self._is_closing = False

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    def allowed(self) -> NDArray[np.intp] | None:
        allowed = None if self._inner is None else self._inner.allowed()
        if self._closing and not self._is_closing and self._splitter.is_thinking and self._left <= 0:
            # In the middle of a character the rule around it takes nothing else: the marker waits for its end.
            self._is_closing = allowed is None or self._closing[0] in allowed
        return np.array(self._closing[:1], np.intp) if self._is_closing and self._closing else allowed

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
        if self._is_closing:
            del self._closing[:1]
        if self._closing:
            was_thinking = self._splitter.is_thinking
            self._splitter.push(self._decoder.push(token_id))
            self._left -= was_thinking
            if was_thinking and not self._splitter.is_thinking and not self._is_closing:
                self._closing.clear()  # it came to an end by itself
