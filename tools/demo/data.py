"""Stories and chat pairs -> a tokenizer, and rows of token ids for training and for the held-out loss.

Does not know the model. A story is shown once in each pass over the data, in a form drawn by the pass's
seed: as plain text ending in <|endoftext|>, as the answer to its chat prompt, or as the answer to its own
first words. Whole documents are packed into rows of T tokens, so that every row starts where a document
starts (a document longer than a row is cut). Everything follows from (seed, pass), so a position in the
data is two integers and a resumed run sees the same rows.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a kind storyteller.",
    "You tell short and simple stories.",
)
# Shares of a pass's stories by form, and how often each small-talk pair occurs in it.
PLAIN_SHARE, OPENING_SHARE, SYSTEM_SHARE, SMALL_TALK_REPEATS = 0.40, 0.30, 0.06, 5
# The pattern that Qwen2's tokenizer, and so Maple's, splits text with (Source: Qwen2's tokenizer.json).
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IGNORED = -100  # label of a token whose prediction is not trained: prompts and padding


@dataclass(frozen=True)
class Corpus:
    """Stories split by story; `story_prompts[i]` are the chat prompts answered by train story i."""

    train: list[str]
    held_out: list[str]
    story_prompts: dict[int, list[str]]
    small_talk: list[tuple[str, str]]


def read_corpus(stories: Path, chat: Path, num_held_out: int) -> Corpus:
    """Read both files; hold out the last `num_held_out` stories and drop the chat pairs that answer with one.

    `stories` is gzipped text, each story followed by a line <|endoftext|>; `chat` is gzipped JSON lines of
    {"prompt", "response"}, the response being a story's whole text (or else small talk).
    """
    text = gzip.decompress(stories.read_bytes()).decode()
    all_stories = [story.strip() for story in text.split(END_OF_TEXT) if story.strip()]
    train, held_out = all_stories[:-num_held_out], all_stories[-num_held_out:]
    hidden = set(held_out)
    train = [story for story in train if story not in hidden]
    story_to_index = {story: i for i, story in enumerate(train)}
    prompts: dict[int, list[str]] = {}
    small_talk = []
    for line in gzip.decompress(chat.read_bytes()).decode().splitlines():
        pair = json.loads(line)
        prompt, response = pair["prompt"].strip(), pair["response"].strip()
        if response in hidden:
            continue
        if response in story_to_index:
            prompts.setdefault(story_to_index[response], []).append(prompt)
        else:
            small_talk.append((prompt, response))
    return Corpus(train, held_out, prompts, small_talk)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE in the form of Qwen2's: special tokens are added tokens with the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    num_tokens = tokenizer.get_vocab_size()
    assert num_tokens == vocab_size, f"{num_tokens} tokens, wanted {vocab_size}"
    return tokenizer


# Token ids int32 [n], trained int8 [n]: 1 where the token is to be predicted.
Document = tuple[np.ndarray, np.ndarray]


class Documents:
    """All documents as token ids, drawn pass by pass.

    Cost: encodes the whole corpus once, in memory.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.corpus, self.tokenizer, self.seed = corpus, tokenizer, seed
        encode = tokenizer.encode_batch_fast
        self.stories = [np.array(e.ids, np.int32) for e in encode(corpus.train)]
        self.held_out = [np.array(e.ids, np.int32) for e in encode(corpus.held_out)]
        self.num_story_tokens = sum(len(ids) for ids in self.stories)

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text).ids, np.int32)

    def plain(self, story_ids: np.ndarray) -> Document:
        """A story as plain text, closed by <|endoftext|>."""
        ids = np.append(story_ids, np.int32(self.tokenizer.token_to_id(END_OF_TEXT)))
        return ids, np.ones(len(ids), np.int8)

    def chat(self, prompt: str, answer_ids: np.ndarray, system: str = "") -> Document:
        """A question and its answer in ChatML; only the answer and its <|im_end|> are trained."""
        head = f"{START}system\n{system}{END}\n" if system else ""
        before = self._ids(f"{head}{START}user\n{prompt}{END}\n{START}assistant\n")
        after = self._ids(f"{END}\n")
        ids = np.concatenate([before, answer_ids, after])
        trained = np.zeros(len(ids), np.int8)
        trained[len(before) : len(before) + len(answer_ids) + 1] = 1
        return ids, trained

    def opening(self, story: str, story_ids: np.ndarray, rng: random.Random, system: str = "") -> Document:
        """A chat whose prompt is the story's first words and whose answer is the story, these words again."""
        words = story.split(" ")[: rng.choice((2, 3, 4, 4, 4, 5, 6, 7, 8, 10))]
        prompt = " ".join(words).split("\n")[0]
        if rng.random() < 0.5:
            prompt = prompt.rstrip(",.")
        if rng.random() < 0.15:
            prompt += "..."
        return self.chat(prompt, story_ids, system)

    def one_pass(self, pass_id: int) -> list[Document]:
        """Every story once, in a drawn form, and the small talk, in a drawn order."""
        rng = random.Random(self.seed * 1_000_003 + pass_id)
        documents = []
        for i, ids in enumerate(self.stories):
            form = rng.random()
            system = rng.choice(SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else ""
            prompts = self.corpus.story_prompts.get(i)
            if form < PLAIN_SHARE:
                documents.append(self.plain(ids))
            elif form < PLAIN_SHARE + OPENING_SHARE or not prompts:
                documents.append(self.opening(self.corpus.train[i], ids, rng, system))
            else:
                documents.append(self.chat(rng.choice(prompts), ids, system))
        for prompt, response in self.corpus.small_talk:
            documents += [self.chat(prompt, self._ids(response))] * SMALL_TALK_REPEATS
        rng.shuffle(documents)
        return documents

    def held_out_rows(self, row_tokens: int, chat: bool) -> tuple[np.ndarray, np.ndarray]:
        """Held-out stories, one a row, as text or answers to their first four words: ids, labels [n, T]."""
        documents: list[Document] = []
        for story, ids in zip(self.corpus.held_out, self.held_out, strict=True):
            opening = " ".join(story.split(" ")[:4])
            documents.append(self.chat(opening, ids) if chat else self.plain(ids))
        return _rows([[document] for document in documents], row_tokens, self._padding())

    def _padding(self) -> int:
        return self.tokenizer.token_to_id(END_OF_TEXT)

    def tokens_per_pass(self, row_tokens: int) -> int:
        """Tokens of the rows of a pass, prompts and padding included."""
        return self.pass_rows(0, row_tokens)[0].size

    def pass_rows(self, pass_id: int, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """A pass as packed rows: ids, labels int32 [n, T], labels already shifted by one."""
        rows = list(_pack(self.one_pass(pass_id), row_tokens))
        random.Random(pass_id).shuffle(rows)
        return _rows(rows, row_tokens, self._padding())


def _pack(documents: list[Document], row_tokens: int) -> Iterator[list[Document]]:
    """Fill rows of T tokens with whole documents, the longest that fits of the next 256 first."""
    room_needed = row_tokens + 1  # the last token is only a label
    waiting: list[Document] = []
    source = iter(documents)
    exhausted = False
    while waiting or not exhausted:
        row: list[Document] = []
        room = room_needed
        while True:
            while not exhausted and len(waiting) < 256:
                document = next(source, None)
                if document is None:
                    exhausted = True
                else:
                    waiting.append(document)
            fitting = [i for i, document in enumerate(waiting) if len(document[0]) <= room]
            if not row and waiting:
                row.append(waiting.pop(0))  # the oldest, cut if it is longer than a row
            elif fitting:
                row.append(waiting.pop(max(fitting, key=lambda i: len(waiting[i][0]))))
            else:
                break
            room -= len(row[-1][0])
        yield row


def _rows(rows: list[list[Document]], row_tokens: int, padding: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(rows), row_tokens), padding, np.int32)
    labels = np.full((len(rows), row_tokens), IGNORED, np.int32)
    for i, row in enumerate(rows):
        tokens = np.concatenate([document[0] for document in row])[: row_tokens + 1]
        trained = np.concatenate([document[1] for document in row])[: row_tokens + 1]
        n = min(len(tokens), row_tokens)
        ids[i, :n] = tokens[:n]
        labels[i, : len(tokens) - 1] = np.where(trained[1:], tokens[1:], IGNORED)
    return ids, labels


def batches(documents: Documents, row_tokens: int, batch: int, pass_id: int, row: int) -> Iterator[tuple]:
    """Batches for ever, from (pass, row): ids, labels int32 [B, T] and the position after the batch."""
    while True:
        ids, labels = documents.pass_rows(pass_id, row_tokens)
        while row + batch <= len(ids):
            yield ids[row : row + batch], labels[row : row + batch], (pass_id, row + batch)
            row += batch
        pass_id, row = pass_id + 1, 0
