"""The pool's room as MLX sees it: a bank of arrays, one row a slot.

A bank holds the experts of one layout (shapes and dtypes of their tensors): an array [S, ...] a tensor. The store reads
straight into a row through the array's memory, after the computation that last read the row was evaluated; which row
that is, is data to MLX and never changes a result. Only this file writes into arrays that MLX knows. It knows no
arithmetic, and not who is in which row.

Sizes: S slots, E experts of a layer, m pieces that a read brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from spile.engines.mlx.experts import ExpertLayer, Piece
from spile.errors import CheckpointError
from spile.files.finite import DAMAGED_HINT
from spile.residency.pool import Reads, Room
from spile.residency.store import PAGE_NBYTES

_Staged = list[tuple[Piece, NDArray[np.uint8]]]  # pieces that are put in place when they are there
# Bits of an exponent, all of which are set where a value is infinite or no number.
_INFINITIES: dict[Any, tuple[Any, Any]] = {
    mx.bfloat16: (np.uint16, np.uint16(0x7F80)),
    mx.float16: (np.uint16, np.uint16(0x7C00)),
    mx.float32: (np.uint32, np.uint32(0x7F800000)),
}


class Bank(Room):
    """Arrays [S, ...] for the experts of some layers, all of one layout.

    `on_resize` are called before the arrays are made anew: whoever holds views of them gives these up.
    """

    def __init__(self, layers: Sequence[ExpertLayer], num_experts: int) -> None:
        """`num_experts` are the most of any layer of the model."""
        self._layers = {layer.index: layer for layer in layers}
        self.layout = layers[0].layout
        self.num_experts, self.num_slots = num_experts, 0
        self.keys = np.concatenate(
            [layer.index * num_experts + np.arange(layer.num_experts) for layer in layers]
        )
        self.slot_nbytes = layers[0].expert_nbytes
        self.on_resize: list[Callable[[], None]] = []
        # of each part, the array, and the same memory as [S, bytes of a row]
        self.parts: list[tuple[Any, NDArray[np.uint8]]] = []
        self._staged: dict[int, tuple[int, _Staged]] = {}  # by slot: the expert that comes, and its pieces
        self._looked_at = np.zeros(int(self.keys.max()) + 1, bool)  # experts whose values were found finite
        self._pending: list[Any] = []  # results that read slots and may not be evaluated yet

    def resize(self, num_slots: int) -> None:
        """Make the arrays anew, one after the other, so that only one is there twice."""
        if num_slots == self.num_slots:
            return
        self._evaluate()
        for give_up in self.on_resize:
            give_up()
        self.num_slots = num_kept = min(self.num_slots, num_slots)
        for index, part in enumerate(self.layout):
            array = mx.zeros((num_slots, *part.shape), part.dtype)
            mx.eval(array)
            raw = array.view(mx.uint8) if array.ndim > 1 else array.reshape(num_slots, 1).view(mx.uint8)
            mx.eval(raw)
            rows = np.array(raw, copy=False).reshape(num_slots, part.nbytes)
            if index < len(self.parts):
                rows[:num_kept] = self.parts[index][1][:num_kept]
            self.parts[index : index + 1] = [(array, rows)]
            mx.clear_cache()
        self.num_slots = num_slots

    def settle(self, indices: Any) -> NDArray[np.int64]:
        """Evaluate the router's ids, and whatever still has to read slots. Returns the ids. Blocks."""
        self._evaluate(indices)
        return np.array(indices).astype(np.int64)

    def add_pending(self, result: Any) -> None:
        """Remember a result that reads slots: no slot is written to before it was evaluated."""
        self._pending.append(result)

    def reads(self, keys: NDArray[np.int64], slots: Sequence[int]) -> Reads:
        self._evaluate()
        extents, addresses = [], []
        for key, slot in zip(keys.tolist(), slots, strict=True):
            staged: _Staged = []
            for piece in self._layers[key // self.num_experts].pieces(key % self.num_experts):
                row = self.parts[piece.part][1][slot]
                if piece.place is not None:
                    row = np.empty(piece.extent.nbytes, np.uint8)
                    staged.append((piece, row))
                extents.append(piece.extent)
                # the store writes an extent as far into its page as it lies in the file's
                addresses.append(row.ctypes.data - piece.extent.offset % PAGE_NBYTES)
            self._staged[slot] = key, staged
        shards, offsets, nbytes = np.array(extents, np.int64).reshape(len(keys), -1, 3).transpose(2, 0, 1)
        return shards, offsets, nbytes, np.array(addresses, np.int64).reshape(len(keys), -1)

    def arrive(self, slots: Sequence[int]) -> None:
        """Put pieces that are no whole part in place, and look at what has come for the first time.

        Raises: CheckpointError for a value that is not finite.
        """
        for slot in slots:
            key, staged = self._staged.pop(slot)
            for piece, data in staged:
                part, view = self.layout[piece.part], piece.view
                dtype = np.dtype(f"u{view.itemsize}")
                source = np.ndarray(view.shape[1:], dtype, data.data, 0, view.strides[1:])
                if view.negated:
                    source = source ^ dtype.type(1 << (8 * view.itemsize - 1))
                row = self.parts[piece.part][1][slot].view(dtype).reshape(part.shape)
                assert piece.place is not None
                row[piece.place] = source
            if not self._looked_at[key]:
                self._check_finite(slot, key)
                self._looked_at[key] = True

    def _check_finite(self, slot: int, key: int) -> None:
        """Look at a slot's scales, biases and offsets, which a clamp could hide when they are not finite; not at
        unquantized weights, whose products show it.
        """
        layer, expert = self._layers[key // self.num_experts], key % self.num_experts
        for part, (_, rows) in zip(self.layout, self.parts, strict=True):
            if part.dtype not in _INFINITIES or part.name.endswith("weight"):
                continue
            dtype, infinity = _INFINITIES[part.dtype]
            if (rows[slot].view(dtype) & infinity == infinity).any():
                raise CheckpointError(
                    f"{layer.path}.{part.name}: expert {expert} holds a value that is not finite",
                    DAMAGED_HINT,
                )

    def places(self, keys: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Return the slots themselves [n]: a row's number in every part's array."""
        return slots.astype(np.uint32)

    def view(self, part: int, num_rows: int) -> Any:
        """Return the array of a part as if it had so many rows: MLX's Metal kernels are chosen by rows wanted for
        each row there is, and a bank must not differ in that from a layer with all its experts. Rows past the
        bank's end are never asked for. Cost: none, the memory is the bank's.

        On the CPU, which has one kernel, a slot's place is taken modulo the rows: never fewer than the bank's.
        """
        array = self.parts[part][0]
        if mx.default_device() == mx.Device(mx.cpu):
            num_rows = max(num_rows, self.num_slots)
        strides = [1]
        for size in reversed(array.shape[1:]):
            strides.insert(0, strides[0] * size)
        return mx.as_strided(array, (num_rows, *array.shape[1:]), strides)

    def close(self) -> None:
        self.num_slots = 0
        for give_up in self.on_resize:
            give_up()
        self.parts.clear()
        self._pending.clear()
        self._staged.clear()

    def _evaluate(self, *more: Any) -> None:
        mx.eval(*more, *self._pending)
        self._pending.clear()
