"""Turns the bytes of a compressed body into those that were meant, piece by piece and never more than asked for.

It does not know sockets or limits: whoever reads a body says how much is still wanted.
"""

from __future__ import annotations

import zlib

from spile.server.errors import RequestError

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's window bits, which say what stands around the data


class BodyDecoder:
    """Decodes one body. `push` its chunks, then `finish`."""

    def __init__(self, encoding: str | None) -> None:
        """`encoding` is the header Content-Encoding.

        Raises: RequestError (415) for one that is not known.
        """
        name = (encoding or "identity").strip().lower()
        if name not in ("identity", "gzip", "x-gzip", "deflate"):
            raise RequestError(
                "the body is compressed in a way that is not known here: use gzip, deflate, or none",
                status=415,
                code="unsupported_encoding",
            )
        self._name = name
        self._bits = _ZLIB if name == "deflate" else _GZIP
        self._inflate = None if name == "identity" else zlib.decompressobj(self._bits)
        self._has_begun = False

    @property
    def is_compressed(self) -> bool:
        return self._inflate is not None

    def push(self, chunk: bytes, most: int) -> bytes:
        """Return what a chunk stands for, at most `most` bytes of it: whoever gets as much has had enough.

        Raises: RequestError for what is damaged.
        """
        if self._inflate is None:
            return chunk[:most]
        found = bytearray()
        while chunk and len(found) < most:
            if self._inflate.eof:  # gzip may have several parts
                if self._name == "deflate":
                    raise self._damaged()
                self._inflate = zlib.decompressobj(self._bits)
            if not self._has_begun and self._name == "deflate" and chunk[0] & 0x0F != 8:
                self._inflate = zlib.decompressobj(_RAW)  # some send it bare
            self._has_begun = True
            try:
                found += self._inflate.decompress(chunk, most - len(found))
            except zlib.error:
                raise self._damaged() from None
            chunk = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        return bytes(found)

    def finish(self) -> None:
        """Check that nothing is missing.

        Raises: RequestError.
        """
        if self._inflate is not None and self._has_begun and not self._inflate.eof:
            raise self._damaged()

    def _damaged(self) -> RequestError:
        return RequestError(f"the body is not valid {self._name}", code="invalid_encoding")
