"""Turns the printable letters in which byte-level vocabularies write bytes into those bytes.

Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py: printable Latin-1
characters stand for themselves, the 68 other bytes for the characters from 256 on.
"""

from collections.abc import Mapping


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def entry_bytes(text: str, byte_of: Mapping[str, int]) -> bytes:
    """Return an entry's bytes; an entry with a character outside of the alphabet stands for itself, as in
    `tokenizers`.
    """
    try:
        return bytes([byte_of[char] for char in text])
    except KeyError:
        return text.encode()
