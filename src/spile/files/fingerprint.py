"""A checkpoint into a short text that names it: the same for a copy, another for other weights.

It is no proof against damage (`digests.py` is): of every tensor it reads a page. That tells two trainings of one
shape apart, as those differ everywhere, and costs 0.1 s where digests of all bytes take many.
"""

from __future__ import annotations

import json
import os

from spile.errors import ReadError
from spile.files.checkpoint import Checkpoint

SAMPLE_NBYTES = 4096  # of a tensor, from its middle


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 32 hexadecimal digits over the config, every tensor's name, type and shape, and a sample of its
    bytes. However tensors are split over shards does not matter. Touches disk.

    Raises: ReadError.
    """
    import hashlib  # 5 MB, for nothing where nobody asks

    digest = hashlib.sha256(json.dumps(dict(checkpoint.config), sort_keys=True).encode())
    files: list[int] = []
    try:
        for path in checkpoint.shards:
            try:
                files.append(os.open(path, os.O_RDONLY))
            except OSError as error:
                raise ReadError.at(path, 0, SAMPLE_NBYTES, 0, error.strerror) from error
        for name, tensor in sorted(checkpoint.tensors.items()):
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)} ".encode())
            wanted = min(SAMPLE_NBYTES, tensor.nbytes)
            offset = tensor.offset + (tensor.nbytes - wanted) // 2
            data = os.pread(files[tensor.shard], wanted, offset)
            if len(data) < wanted:
                raise ReadError.at(
                    checkpoint.shards[tensor.shard], offset, wanted, len(data), "the file ends there"
                )
            digest.update(data)
    finally:
        for file in files:
            os.close(file)
    return digest.hexdigest()[:32]
