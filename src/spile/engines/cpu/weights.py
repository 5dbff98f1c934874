"""Turns a model's tensors into the addresses that the native decoder reads: mapped in place, or copied once.

It does not compute, and knows nothing of slots: experts' codes are the pool's. Every array and mapping that
an address points into is kept alive here.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spile.architectures.spec import TERNARY, Glu, OwnModel, Weight
from spile.errors import ReadError
from spile.files.checkpoint import read_into
from spile.residency.experts import Extent, read_row_alpha
from spile.residency.store import Store


class Weights:
    """The weights that stay resident, by address."""

    def __init__(self, model: OwnModel, *, is_mapped: bool) -> None:
        """Map the shards, or make ready to copy.

        Raises: ReadError when a shard cannot be mapped.
        """
        self._model = model
        self._kept: list[NDArray[np.generic]] = []
        self._maps: list[mmap.mmap] = []
        self.shard_addresses: list[int] = []
        if is_mapped:
            for path in model.checkpoint.shards:
                try:
                    with path.open("rb") as file:
                        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as error:
                    raise ReadError(f"cannot map {path}: {error}") from error
                view = np.frombuffer(mapping, np.uint8)
                self._maps.append(mapping)
                self._kept.append(view)
                self.shard_addresses.append(view.ctypes.data)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of each mapped shard."""
        return [(address, len(m)) for address, m in zip(self.shard_addresses, self._maps, strict=True)]

    def layer(self, layer: int) -> dict[str, int]:
        """Return the addresses of one layer, by the names that `Decoder.set_layer` takes. Touches disk."""
        spec = self._model.spec.layers[layer]
        attention, ffn = spec.attention, spec.ffn
        assert attention.q_norm is not None, "the decoder normalises heads"
        assert attention.k_norm is not None, "the decoder normalises heads"
        norms = {"input_norm": spec.input_norm, "post_norm": spec.post_norm}
        norms |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
        linears = {"q": attention.q, "k": attention.k, "v": attention.v, "o": attention.o}
        glu = ffn if isinstance(ffn, Glu) else ffn.glu
        alphas = {"gate": glu.gate, "up": glu.up, "down": glu.down}
        if isinstance(ffn, Glu):
            linears |= alphas
        else:
            norms["router"] = ffn.router.weight
        addresses = {name: self.tensor(f"{each.name}.weight") for name, each in (norms | linears).items()}
        return addresses | {f"{name}_alpha": self._alpha(each) for name, each in (linears | alphas).items()}

    def tensor(self, name: str) -> int:
        """Return the address of one whole tensor: in place when mapped, else of a private copy. Touches disk."""
        if self._maps:
            tensor = self._model.checkpoint.tensors[name]
            return self.shard_addresses[tensor.shard] + tensor.offset
        return self._keep(self._model.checkpoint.read(name))

    def rows(self, name: str, first: int, count: int) -> NDArray[np.uint8]:
        """Return a private copy of some rows of a tensor, the caller's to keep alive. Touches disk."""
        tensor = self._model.checkpoint.tensors[name]
        nbytes = tensor.nbytes // tensor.shape[0]
        data = np.empty(count * nbytes, np.uint8)
        read_into(self._model.checkpoint.shards[tensor.shard], tensor.offset + first * nbytes, data)
        return data

    def _alpha(self, weight: Weight) -> int:
        if self._maps and weight.format == TERNARY:
            return self.tensor(f"{weight.name}.row_alpha")
        return self._keep(read_row_alpha(self._model, weight))

    def _keep(self, array: NDArray[np.generic]) -> int:
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return array.ctypes.data


class EmbeddingRows:
    """Embedding rows, read on demand: 1.2 kB a token instead of a table of 175 MB."""

    def __init__(self, model: OwnModel, store: Store) -> None:
        self._store = store
        self._tables = model.tensors(model.spec.embedding)
        self._row_nbytes = [tensor.nbytes // tensor.shape[0] for tensor in self._tables]

    def read(
        self, token_ids: Sequence[int]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
        """Return codes, scales and biases of R different rows, uint8 [R, bytes of a row] each, and which of them is
        each token's, int64 [T]. Touches disk.

        Raises: ReadError.
        """
        T = len(token_ids)
        tokens, rows = np.array(token_ids, np.int64), np.zeros(T, np.int64)
        if T > 1:  # a page of text has half as many different tokens
            tokens, rows = np.unique(tokens, return_inverse=True)
        extents = [
            Extent(tensor.shard, tensor.offset + token * nbytes, nbytes)
            for tensor, nbytes in zip(self._tables, self._row_nbytes, strict=True)
            for token in tokens.tolist()
        ]
        R = len(tokens)
        found = self._store.read_if_cached(extents) if R == 1 else None
        if found is None:
            found = self._store.read(extents)
        codes, scales, biases = (np.stack(found[part * R : (part + 1) * R]) for part in range(3))
        return codes, scales, biases, rows.astype(np.int64).reshape(T)
