"""Turns text into token ids and token ids back into text, one whole character at a time.

It does not know the model, nor how ids are chosen. The work is done by `tokenizers`, which is large in memory
(106 MB for a vocabulary of 151,643 entries, 129 MB while it loads). So it makes a compact table of a large
vocabulary once (`bpe_table.py`), and from then on, in this process and later ones, that table does the work
(`bpe.py`). Tokenizers for which there is none are loaded for the first text that is encoded and, unless they
are to be kept, dropped after each. Decoding does not need them: while one is loaded,
the bytes of all entries are put together (1.6 MB). Vocabularies that are not of bytes keep `tokenizers` in
memory.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spile import memory
from spile.errors import SpileError, TextError, quote
from spile.text.alphabet import byte_alphabet, entry_bytes
from spile.text.marks import SAID, Hidden
from spile.text.sidecar import Sidecar, eos_ids_of, read_sidecar

if TYPE_CHECKING:
    from spile.text.bpe import Table

# The size of tokenizer.json from which a table is made: it takes two seconds, once. Smaller ones, of 10,000
# entries and fewer, load in 30 ms and 10 MB.
TABLE_FROM_NBYTES = 500_000
_MOST_NBYTES = 64_000_000  # of a tokenizer.json: the largest in use have 33 MB

# What loading takes at most: 106 MB of objects and twice the file were measured for 151,643 entries; a fifth
# more for others.
_ENTRY_NBYTES = 800
_FILE_FACTOR = 3
_CHARACTER_NBYTES = 200  # of what `tokenizers` returns: 57 for 200,000 characters, 178 for two million
_TABLE_CHARACTER_NBYTES = 130  # with a table: three ids for a character at most, and words of 60 bytes
_SPREAD = 1.2  # a second load finds memory in pieces: 79 MB where the first took 70
_TEXT_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # of UTF-8
_CHATML_END = ("<|im_end|>", "<|endoftext|>")


class Decoder(Protocol):
    """Turns ids into text as they come; what it has given out is never taken back."""

    def push(self, token_id: int) -> str:
        """Return the characters that this id completes, often none."""
        ...

    def flush(self) -> str:
        """Return what can still be said at the end. Half a character is dropped."""
        ...


@dataclass(frozen=True)
class _Vocabulary:
    """All that must outlive the `tokenizers` object. `offsets` is None where decoding needs that object."""

    num_entries: int
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    bos_ids: tuple[int, ...]  # what a text has to begin with; empty for most
    added: tuple[tuple[str, bool], ...]  # tokens that are found as they stand, and whether each is special
    blob: bytes | memoryview = b""
    offsets: array[int] | memoryview | None = None  # 32 bits each, [num_entries + 1]

    def bytes_of(self, token_id: int) -> bytes:
        """Return an entry's bytes as text has them: none for special tokens."""
        return b"" if token_id in self.special_ids else self.entry_bytes(token_id)

    def entry_bytes(self, token_id: int) -> bytes:
        """Return an entry's bytes, those of special tokens too."""
        assert self.offsets is not None, "asked for bytes without a table"
        if not 0 <= token_id < self.num_entries:
            return b""
        return bytes(self.blob[self.offsets[token_id] : self.offsets[token_id + 1]])


class Tokenizer:
    """The tokenizer of one model folder. Opened by `open_tokenizer`; not for several threads at once.

    `keep` says whether what encodes, `tokenizers` or the pages of a table, stays in memory between texts.
    """

    def __init__(self, path: Path, sidecar: Sidecar, config: Mapping[str, Any], *, keep: bool) -> None:
        self.path = path
        self.sidecar = sidecar
        self.keep = keep
        self._config = config
        self._loaded: Any = None  # tokenizers.Tokenizer
        self._vocabulary: _Vocabulary | None = None
        self._measured_nbytes: int | None = None
        self._table: Table | None = None
        self._digest: bytes | None = None  # of tokenizer.json; empty: there is and will be no table

    @property
    def chat_template(self) -> str | None:
        """The template that the folder brings, if any."""
        return self.sidecar.chat_template

    @property
    def is_loaded(self) -> bool:
        """Whether the `tokenizers` object is in memory now."""
        return self._loaded is not None

    @property
    def is_learned(self) -> bool:
        """Whether the entries were read: what is asked of them from now on loads nothing."""
        return self._vocabulary is not None

    @property
    def load_nbytes(self) -> int:
        """Bytes that loading takes: measured, once a load has set the process's peak; else estimated. Where
        a table was opened, its size.
        """
        return self._tokenizers_nbytes if self._table is None else self._table.nbytes

    @property
    def _tokenizers_nbytes(self) -> int:
        if self._measured_nbytes is not None:
            return self._measured_nbytes
        if self._vocabulary is not None:
            num_entries = self._vocabulary.num_entries
        else:
            vocab_size = self._config.get("vocab_size")
            num_entries = vocab_size if isinstance(vocab_size, int) else 0
        try:
            file_nbytes = self.path.stat().st_size
        except OSError:
            file_nbytes = 0
        return num_entries * _ENTRY_NBYTES + file_nbytes * _FILE_FACTOR

    def encode_nbytes(self, text: str) -> int:
        """Bytes that encoding this text takes at most, loading included. Looks for a table on disk."""
        table = self._open_table()
        if table is not None and table.can_encode(text):
            return table.nbytes + len(text) * _TABLE_CHARACTER_NBYTES
        return self._tokenizers_nbytes + len(text) * _CHARACTER_NBYTES

    @property
    def num_entries(self) -> int:
        """The last entry's id plus one; ids from here on mean nothing. Loads on the first use."""
        return self._known().num_entries

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer, by any of the folder's files. Loads on the first use."""
        return self._known().eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that have no text in an answer. Loads on the first use."""
        return self._known().special_ids

    @property
    def added(self) -> tuple[tuple[str, bool], ...]:
        """The tokens that are found in text as it stands, and whether each is special. Loads on the first use, and
        what it loads stays for `encode` or `release`.
        """
        return self._known(stays=True).added

    @property
    def has_bytes(self) -> bool:
        """Whether an entry's bytes are the same whatever stands beside it. Loads on the first use."""
        return self._known().offsets is not None

    @property
    def num_lost_bytes(self) -> int:
        """How many of the bytes that text can have are in no entry: `tokenizers` leaves them out. Loads on the first
        use.
        """
        vocabulary = self._known()
        if vocabulary.offsets is None:
            return 0
        import numpy as np

        offsets, blob = np.frombuffer(vocabulary.offsets, np.uint32), np.frombuffer(vocabulary.blob, np.uint8)
        single = blob[offsets[:-1][np.diff(offsets) == 1]]
        return len(_TEXT_BYTES.difference(single.tolist()))

    @property
    def bos_id(self) -> int | None:
        """The token that every text begins with, if there is one. Loads on the first use."""
        bos_ids = self._known().bos_ids
        return bos_ids[0] if bos_ids else None

    def encode(self, text: str, add_bos: bool = True, hidden: Hidden | None = None) -> list[int]:
        """Turn text into ids. With `add_bos` a model that wants a first token gets it exactly once. `hidden` says
        what was replaced in it so that it makes no mark.

        Without a table, loads `tokenizers` if it is not in memory, and drops it again unless `keep`.

        Raises: TextError for a damaged tokenizer, or text that has no UTF-8 form.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(
                f"the text cannot be encoded: character {error.start:,} is half of a surrogate pair"
            ) from error
        table = self._open_table() or self._make_table()
        if table is not None and table.can_encode(text if hidden is None else hidden.shown(text)):
            token_ids = table.encode(text, hidden)
            if not self.keep:
                table.rest()
        else:
            loaded = self._load()
            self._learn(loaded)
            with self._telling_damage():
                token_ids = _encode_loaded(loaded, text, hidden)
            del loaded
            if not self.keep:
                self.release()
        bos_ids = self._known().bos_ids
        if add_bos and bos_ids and tuple(token_ids[: len(bos_ids)]) != bos_ids:
            token_ids = [*bos_ids, *token_ids]
        return token_ids

    def entry(self, token_id: int) -> bytes:
        """Return what one token stands for, special tokens too; often only a part of a character."""
        vocabulary = self._known()
        if vocabulary.offsets is not None:
            return vocabulary.entry_bytes(token_id)
        text: str = self._load().decode([token_id], skip_special_tokens=False)
        return text.encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """Turn ids into text, as a decoder gives it piece by piece. Special tokens have no text."""
        decoder = self.decoder()
        pieces = [decoder.push(token_id) for token_id in token_ids]
        return "".join(pieces) + decoder.flush()

    def decoder(self) -> Decoder:
        """Make a decoder for one answer."""
        vocabulary = self._known()
        if vocabulary.offsets is not None:
            return _ByteDecoder(vocabulary)
        return _PrefixDecoder(self._load())

    def release(self) -> None:
        """Drop the `tokenizers` object and give its memory back to the system, where decoding does not need
        it.
        """
        if self._loaded is None or (self._vocabulary is not None and self._vocabulary.offsets is None):
            return
        self._loaded = None
        memory.trim()

    def close(self) -> None:
        """Drop everything. May be called twice."""
        self._loaded = None
        self._table = None

    def _known(self, *, stays: bool = False) -> _Vocabulary:
        vocabulary = self._vocabulary
        if vocabulary is None:
            table = self._open_table() or self._make_table()
            if table is not None:
                vocabulary = self._vocabulary = _vocabulary_of(table, self.sidecar, self._config)
                return vocabulary
            vocabulary = self._learn(self._load())
            if not self.keep and not stays:
                self.release()
        return vocabulary

    def _open_table(self) -> Table | None:
        """Open the table that was made earlier, if there is one. Reads tokenizer.json once, for its digest."""
        if self._table is None and self._digest is None:
            self._digest = b""
            try:
                if self.path.stat().st_size < TABLE_FROM_NBYTES:
                    return None
                from spile.text.bpe import open_table, source_digest

                self._digest = source_digest(self.path)
            except OSError:
                return None  # to be told by who reads the file next
            self._table = open_table(self._digest)
        return self._table

    def _make_table(self) -> Table | None:
        """Make a table, where it is worth its time, and leave it for later runs if there is a place."""
        digest, self._digest = self._digest, b""
        if not digest:
            return None
        from spile.text.bpe import Table, open_table, write_table
        from spile.text.bpe_table import NoTableError, build_table

        loaded = self._load()
        with self._telling_damage():
            try:
                table = build_table(self.path, loaded, digest, prefix_ids=_prefix_ids(loaded))
            except NoTableError:
                return None
        del loaded
        self.release()
        self._table = (open_table(digest) if write_table(digest, table) else None) or Table(table)
        return self._table

    def _learn(self, loaded: Any) -> _Vocabulary:
        if self._vocabulary is None:
            with self._telling_damage():
                self._vocabulary = _read_vocabulary(loaded, self.sidecar, self._config)
        return self._vocabulary

    @contextmanager
    def _telling_damage(self) -> Iterator[None]:
        """Turn what `tokenizers` says of a damaged file into a sentence: it raises nothing narrower than Exception,
        and panics, which are none.
        """
        try:
            yield
        except (SpileError, MemoryError):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TextError(
                f"{self.path} cannot be used as a tokenizer: {quote(str(error))[1:-1]}",
                "Download the file again.",
            ) from error

    def _load(self) -> Any:
        if self._loaded is None:
            import tokenizers

            before, peak_before = memory.current_memory_bytes(), memory.peak_memory_bytes()
            with self._telling_damage():
                loaded = tokenizers.Tokenizer.from_file(str(self.path))
            loaded.no_truncation()  # a limit in the file would silently cut prompts
            loaded.no_padding()
            peak = memory.peak_memory_bytes()
            if peak > peak_before and self._measured_nbytes is None:
                self._measured_nbytes = int((peak - before) * _SPREAD)
            self._loaded = loaded
        return self._loaded


def open_tokenizer(
    folder: Path, sidecar: Sidecar | None = None, *, config: Mapping[str, Any], keep: bool = True
) -> Tokenizer | None:
    """Open a folder's tokenizer; None when it has none. `config` is the folder's config.json.

    Reads the small files now, where `sidecar` does not have them; tokenizer.json is read with the first text.

    Raises: TextError for small files that are damaged, or a tokenizer.json that cannot be read.
    """
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block
            raise TextError(f"{path} cannot be read: it is not a regular file")
        if status.st_size > _MOST_NBYTES:
            raise TextError(
                f"{path} has {status.st_size:,} bytes: it is larger than the {_MOST_NBYTES:,} such a file may have"
            )
        path.open("rb").close()
    except FileNotFoundError as error:
        raise TextError(f"{path} is a link to a file that does not exist") from error
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror or error}") from error
    return Tokenizer(path, sidecar or read_sidecar(folder), config, keep=keep)


class _ByteDecoder:
    """Joins the bytes of entries; an incremental decoder holds back half characters."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.bytes_of(token_id))

    def flush(self) -> str:
        self._utf8.reset()  # at most three bytes of a character that never came
        return ""


class _PrefixDecoder:
    """Decodes a growing window with `tokenizers` and gives out what each id adds to it.

    For decoders in which an entry's text depends on its neighbours. The window begins with the ids that made
    the last text, so that a leading space is not lost, and moves on whenever text was given out.
    """

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._window: list[int] = []
        self._num_told = 0  # leading ids of the window whose text was given out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._text(self._window[: self._num_told])
        text = self._text(self._window)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        before = self._text(self._window[: self._num_told])
        text = self._text(self._window)[len(before) :].rstrip("\ufffd")
        self._num_told = len(self._window)
        return text

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._loaded.decode(token_ids, skip_special_tokens=True)
        return text


def _vocabulary_of(table: Table, sidecar: Sidecar, config: Mapping[str, Any]) -> _Vocabulary:
    """Read the same from a table. Its bytes stay in the file."""
    added = table.meta.added
    special_ids = frozenset(token.token_id for token in added if token.special and token.content not in SAID)
    return _Vocabulary(
        num_entries=table.num_entries,
        eos_ids=_find_eos_ids(table.token_to_id, sidecar, config, special_ids),
        special_ids=special_ids,
        bos_ids=_find_bos_ids(table.token_to_id, sidecar, lambda: table.meta.prefix_ids),
        added=tuple((token.content, token.special) for token in added),
        blob=table.blob,
        offsets=table.offsets,
    )


def _read_vocabulary(loaded: Any, sidecar: Sidecar, config: Mapping[str, Any]) -> _Vocabulary:
    """Read what is needed once `tokenizers` is gone."""
    added = loaded.get_added_tokens_decoder()  # {id: AddedToken}
    special_ids = frozenset(i for i, token in added.items() if token.special and token.content not in SAID)
    is_byte_level = _is_byte_level(loaded.decoder)
    byte_of = byte_alphabet()
    blob, offsets = bytearray(), array("I", [0])
    num_entries = 0
    for token_id, text in _entries(loaded, config, max(added, default=-1)):
        if is_byte_level and text is not None:
            blob += added[token_id].content.encode() if token_id in added else entry_bytes(text, byte_of)
        offsets.append(len(blob))
        if text is not None:
            num_entries = token_id + 1
    return _Vocabulary(
        num_entries=num_entries,
        eos_ids=_find_eos_ids(loaded.token_to_id, sidecar, config, special_ids),
        special_ids=special_ids,
        bos_ids=_find_bos_ids(loaded.token_to_id, sidecar, lambda: _prefix_ids(loaded)),
        added=tuple((token.content, token.special) for token in added.values()),
        blob=bytes(blob),
        offsets=offsets[: num_entries + 1] if is_byte_level else None,
    )


def _encode_loaded(loaded: Any, text: str, hidden: Hidden | None) -> list[int]:
    """Encode with `tokenizers`. What stands between two added tokens is encoded anew where `hidden` says anything of
    it, by the same steps but the search for added tokens.
    """
    found = loaded.encode(text, add_special_tokens=False)
    if hidden is None or not hidden.is_in(text):
        return list(found.ids)
    added = {token_id: token.content for token_id, token in loaded.get_added_tokens_decoder().items()}
    token_ids: list[int] = []
    since, start = 0, 0  # the first id after the last added token, and where its text begins
    for index, (token_id, (begin, end)) in enumerate(
        [*zip(found.ids, found.offsets, strict=True), (None, (len(text), len(text)))]
    ):
        if token_id is not None and text[begin:end].strip() != added.get(token_id, "\0").strip():
            continue
        piece = text[start:begin]
        if hidden.is_in(piece):
            token_ids += _plain_ids(loaded, hidden.shown(piece), is_first=start == 0)
        else:
            token_ids += found.ids[since:index]
        if token_id is not None:
            token_ids.append(token_id)
        since, start = index + 1, end
    return token_ids


def _plain_ids(loaded: Any, piece: str, *, is_first: bool) -> list[int]:
    """Encode a piece of a text in which no added token is looked for. Some tokenizers treat the first otherwise."""
    import tokenizers

    lead = "" if is_first else "."
    pieces = tokenizers.PreTokenizedString(lead + piece)
    if lead:
        pieces.split(lambda _, whole: [whole[:1], whole[1:]])
    if loaded.normalizer is not None:
        pieces.normalize(loaded.normalizer.normalize)
    if loaded.pre_tokenizer is not None:
        loaded.pre_tokenizer.pre_tokenize(pieces)
    pieces.tokenize(loaded.model.tokenize)
    found = pieces.to_encoding()
    return [i for i, (begin, _) in zip(found.ids, found.offsets, strict=True) if begin >= len(lead)]


def _entries(loaded: Any, config: Mapping[str, Any], last_added: int) -> Iterator[tuple[int, str | None]]:
    """Yield every id with its entry as the vocabulary writes it: one at a time, as a dictionary of them is
    large.

    Ids may have gaps, so the walk ends when as many entries were seen as there are, or past the model's last
    row.
    """
    vocab_size = config.get("vocab_size")
    num_wanted = loaded.get_vocab_size(with_added_tokens=True)
    end = max(last_added + 1, num_wanted, vocab_size if isinstance(vocab_size, int) else 0)
    for token_id in range(end):
        text = loaded.id_to_token(token_id)
        yield token_id, text
        num_wanted -= text is not None
        if num_wanted == 0 and token_id >= last_added:
            return


def _find_eos_ids(
    token_to_id: Callable[[str], int | None],
    sidecar: Sidecar,
    config: Mapping[str, Any],
    special_ids: frozenset[int],
) -> frozenset[int]:
    """Merge the end tokens of all files; a ChatML model ends at both of its markers in any case. A name that is no
    token of the vocabulary ends nothing.
    """
    eos_ids = set(eos_ids_of(config) | eos_ids_of(sidecar.generation_config))
    named = sidecar.special_token("eos_token")
    if named is not None and (token_id := token_to_id(named)) is not None:
        eos_ids.add(token_id)
    if token_to_id(_CHATML_END[0]) in special_ids:
        eos_ids.update(
            token_id
            for text in _CHATML_END
            if (token_id := token_to_id(text)) is not None and token_id in special_ids
        )
    return frozenset(eos_ids)


def _find_bos_ids(
    token_to_id: Callable[[str], int | None], sidecar: Sidecar, prefix_ids: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    """Find what every text has to begin with: tokenizer_config.json says so, or the tokenizer's
    post-processor does it.
    """
    wanted = sidecar.tokenizer_config.get("add_bos_token")
    if wanted is False:
        return ()
    named = sidecar.special_token("bos_token")
    if wanted is True and named is not None and (token_id := token_to_id(named)) is not None:
        return (token_id,)
    return prefix_ids()


def _prefix_ids(loaded: Any) -> tuple[int, ...]:
    """Find what a tokenizer's post-processor puts before a text."""
    plain = loaded.encode("a", add_special_tokens=False).ids
    processed = loaded.encode("a", add_special_tokens=True).ids
    for start in range(len(processed) - len(plain) + 1):
        if processed[start : start + len(plain)] == plain:
            return tuple(processed[:start])
    return ()


def _is_byte_level(decoder: Any) -> bool:
    """Whether a tokenizer's decoder joins bytes that are written as characters (GPT-2's alphabet) and does
    nothing else.
    """
    if decoder is None:
        return False
    described = json.loads(decoder.__getstate__())
    parts = described.get("decoders", [described])
    return [part.get("type") for part in parts] == ["ByteLevel"]
