"""Turns a file that is read as a whole into its bytes, or into a sentence that says why it is none to read.

It does not know formats. Regular files of a size that such a file may have, and no others: a pipe would be waited for,
and a device never ends.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from spile.errors import SpileError, shown


def read_whole(path: Path, most_nbytes: int, error: type[SpileError]) -> bytes:
    """Read a file.

    Raises: FileNotFoundError where nothing has that name; `error` naming the file for all else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{shown(path)} cannot be read: it is not a regular file")
            size = status.st_size
            data = file.read(most_nbytes + 1) if size <= most_nbytes else b""
    except FileNotFoundError as failure:
        if path.is_symlink():
            raise error(f"{shown(path)} is a link to a file that does not exist") from failure
        raise
    except IsADirectoryError as failure:
        raise error(f"{shown(path)} cannot be read: it is not a regular file") from failure
    except (OSError, ValueError) as failure:  # ValueError: a name that cannot be one
        raise error(
            f"{shown(path)} cannot be read: {getattr(failure, 'strerror', None) or failure}"
        ) from failure
    size = max(size, len(data))
    if size > most_nbytes:
        raise error(
            f"{shown(path)} has {size:,} bytes: it is larger than the {most_nbytes:,} such a file may have"
        )
    return data
