"""Turns a number of entries into a working byte-level BPE tokenizer of that size, for random checkpoints.

The vocabulary is 256 bytes and then one entry a merge: first common English words, letter by letter, so
that English text takes few tokens; then made-up words of syllables, which give a tokenizer of the real
size its real cost in memory. Every merge joins two entries that stand before it. Pre-tokenizer,
normaliser, special tokens and chat template are of the kind that Qwen2 and Maple have. It does not know
the model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_BYTES = 256
# Qwen2's and Qwen3's added tokens, in their order; True: special (skipped when text is shown)
_ADDED_TOKENS = {
    "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<|object_ref_start|>": True,
    "<|object_ref_end|>": True, "<|box_start|>": True, "<|box_end|>": True, "<|quad_start|>": True,
    "<|quad_end|>": True, "<|vision_start|>": True, "<|vision_end|>": True, "<|vision_pad|>": True,
    "<|image_pad|>": True, "<|video_pad|>": True, "<tool_call>": False, "</tool_call>": False,
    "<|fim_prefix|>": False, "<|fim_middle|>": False, "<|fim_suffix|>": False, "<|fim_pad|>": False,
    "<|repo_name|>": False, "<|file_sep|>": False, "<tool_response>": False, "</tool_response>": False,
    "<think>": False, "</think>": False,
}  # fmt: skip
NUM_ADDED = len(_ADDED_TOKENS)
_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nA call is JSON with name and arguments between <tool_call> and </tool_call>.' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
_COMMON_WORDS = """
the of and to in a is that for it on was with as be by at this are have from or not an but they which one
you were all her she there would their we him been has when who will no more if out so said what up its
about than into them can only other time new some could these two may first then do any like my now over
such our man me even most made after also did many off before must well back through years much where your
way down should because long each just state those people too mr how little good world make very year still
see own work men day get here old life both between being under three never know same last another while us
might great go come since against right came take used himself few house use place during high without again
home around small however found part went say once general upon school every does got united left number
course war until always away something fact water less public put think almost hand enough far took head yet
government system set better told nothing night end why called didn eyes find going look asked later point
knew next program city business give group toward days young let room side social present given several
order national second possible rather per face among form important often things looked early white case
become large big need four within felt along children saw best church ever least power development light
thing seemed family interest want members mind country area others done turned although open god service
certain kind problem began different door thus help means sense whole matter field sun story answer question
river tree garden bird morning window table letter music number paper ground garden voice body money car
street word words book line name land food letter mother father brother sister friend boy girl child woman
king queen castle forest mountain sea island ship road bridge village town winter summer spring autumn snow
rain wind fire stone gold silver red blue green black brown yellow happy sad angry afraid brave kind gentle
quiet loud soft hard hot cold warm cool fast slow strong weak clean dirty bright dark deep full empty heavy
light near far wide narrow short tall thick thin round flat sharp smooth rough sweet bitter fresh dry wet
free busy ready sure true false real simple easy difficult clear strange common special single double whole
half able likely main major minor local human modern ancient natural physical medical legal political
economic military foreign private personal final recent walk run jump play eat drink sleep dream sing dance
read write speak talk listen hear watch feel touch smell taste laugh cry smile love hate hope fear wish
believe think learn teach study remember forget understand explain ask answer call tell show bring carry
hold keep leave stay move turn stop start begin finish open close break fix build make create draw paint cut
push pull throw catch hit fall rise climb fly swim drive ride sit stand lie wait meet join visit travel
return arrive enter pass cross follow lead win lose fight save help serve share send receive buy sell pay
cost spend earn own grow change develop increase reduce improve move allow include continue provide consider
suggest require report decide appear happen exist seem remain become expect offer support produce contain
describe identify compare measure test check function return class value string list file data code error
type index model token input output result python import self def true false none null int float char void
public static const struct array object print length size user server client request response message
example method variable parameter argument default option memory disk cache layer expert weight tensor
matrix vector number integer random seed budget engine thread process kernel buffer stream batch prompt
generate context attention language machine learning training network computer software hardware science
research theory
"""
_ENDINGS = [
    "s",
    "ed",
    "ing",
    "er",
    "ly",
    "ion",
    "tion",
    "ation",
    "ment",
    "ness",
    "able",
    "ally",
    "ive",
    "ful",
    "est",
]
_ONSETS = ["", *"bcdfghjklmnprstvwyz", "br", "ch", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "qu", "sc", "sh"]
_ONSETS += ["sl", "sp", "st", "str", "th", "tr", "wh"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "io", "oo", "ou"]
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "ck", "ll", "nd", "ng", "nt", "rd", "ss", "st", "x"]


def tokenizer_files(num_entries: int, vocab_size: int, seed: int) -> tuple[dict[str, Any], int | None]:
    """Make the contents of the JSON files that a tokenizer needs, by file name, and the id that ends a turn.

    Entries are as many as the vocabulary has room for beside the added tokens; where the 256 bytes do not
    fit, or none are wanted, there is no tokenizer: no files and no id.
    """
    num_entries = min(num_entries, vocab_size - NUM_ADDED)
    if num_entries < NUM_BYTES:
        return {}, None
    merges = _merges(num_entries - NUM_BYTES, seed)
    entries = [*_byte_letters().values(), *(left + right for left, right in merges)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": num_entries + position, "content": content, **flags, "special": special}
        for position, (content, special) in enumerate(_ADDED_TOKENS.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {entry: position for position, entry in enumerate(entries)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    end_of_text, end_of_turn = num_entries, num_entries + list(_ADDED_TOKENS).index("<|im_end|>")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    generation = {
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
    }
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }, end_of_turn


def write_tokenizer_file(path: Path, value: Any) -> None:
    """Write one of the files as compact JSON, piece by piece."""
    with path.open("w", encoding="utf-8") as file:
        for piece in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(value):
            file.write(piece)


def _merges(count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` merges; each joins two entries that are bytes or results of earlier merges."""
    known = set(_byte_letters().values())
    merges: list[tuple[str, str]] = []
    for word in _words(random.Random(seed)):
        if len(merges) >= count:
            break
        for end in range(2, len(word) + 1):
            if len(merges) < count and word[:end] not in known:
                known.add(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return merges


def _words(source: random.Random) -> Iterator[str]:
    """Yield words without end, the most useful first; \\u0120 is the byte-level letter for a space."""
    words = list(dict.fromkeys(_COMMON_WORDS.split()))
    yield from (f"\u0120{word}" for word in words)
    yield from (f"\u0120{word}{ending}" for word in words for ending in ("s", "ed", "ing", "er", "ly"))
    yield from (f"\u0120{word.capitalize()}" for word in words)
    yield from _ENDINGS
    yield from (word.capitalize() for word in words)
    yield from words
    while True:
        syllables = source.choice((1, 2, 2, 3, 3, 4))
        word = "".join(
            source.choice(_ONSETS) + source.choice(_VOWELS) + source.choice(_CODAS) for _ in range(syllables)
        )
        form = source.random()
        yield f"\u0120{word}" if form < 0.6 else f"\u0120{word.capitalize()}" if form < 0.75 else word


def _byte_letters() -> dict[int, str]:
    """Return the printable letter that byte-level BPE writes for each byte, in the order of GPT-2's entries.

    Source: bytes_to_unicode of openai/gpt-2, encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters
