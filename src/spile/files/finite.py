"""Tensors -> the first value in them that is not a finite number, and the error that names it.

It is asked when a computed value turned out not to be finite; it knows neither the model nor the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from spile.errors import CheckpointError, quote
from spile.files.checkpoint import Tensor, read_into

# Bits of a value's exponent, all of which are set where it is infinite or no number.
_EXPONENTS = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}
DAMAGED_HINT = "The file is damaged: 'spile verify' compares it with its record. Download it again."
_PIECE_NBYTES = 2**20  # read at a time: no plan has counted more


def check_finite(shards: Sequence[Path], tensors: Iterable[tuple[Tensor, int | None]]) -> None:
    """Check the floats of each tensor, or of one entry of its first dimension. Touches disk; skips codes.

    Raises:
        CheckpointError: a value that is not finite, by tensor, file and place.
        ReadError: a shard could not be read.
    """
    for tensor, entry in tensors:
        if tensor.dtype not in _EXPONENTS:
            continue
        dtype, exponent = _EXPONENTS[tensor.dtype]
        itemsize = np.dtype(dtype).itemsize
        nbytes = tensor.nbytes if entry is None else tensor.nbytes // tensor.shape[0]
        start = 0 if entry is None else entry * nbytes
        for at in range(start, start + nbytes, _PIECE_NBYTES):
            data = np.empty(min(_PIECE_NBYTES, start + nbytes - at), np.uint8)
            read_into(shards[tensor.shard], tensor.offset + at, data)
            wrong = (data.view(dtype) & dtype(exponent)) == dtype(exponent)
            if wrong.any():
                place = np.unravel_index(at // itemsize + int(wrong.argmax()), tensor.shape)
                raise CheckpointError(
                    f"tensor {quote(tensor.name)} of {shards[tensor.shard].name} holds a value that is not finite "
                    f"at {[int(index) for index in place]}",
                    DAMAGED_HINT,
                )
