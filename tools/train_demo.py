"""TinyStories text -> the demo model that ships in src/spile/demo/model, trained on a CPU in under two hours.

    python tools/train_demo.py train  --stories stories.txt.gz --chat chat.jsonl.gz --run RUN --seconds 5400
    python tools/train_demo.py train  ... --resume            # where RUN/checkpoint.pt left off
    python tools/train_demo.py export --stories ... --chat ... --run RUN --out src/spile/demo/model

Needs PyTorch, tokenizers and safetensors (development only; spile itself never imports torch). The parts:
demo/data.py (text -> rows of ids), demo/model.py (weights -> logits), demo/train.py (rows -> masters) and
demo/export.py (masters -> the files, checked by running what was written).
"""

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

# glibc gives large blocks back to the system at once, and every step pays for the page faults again: keeping
# them, in huge pages, took a step from 3.9 s to 2.2 s (2 cores, Zen 4). Read when a process starts.
_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def _arguments() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "export"):
        command = commands.add_parser(name)
        add = command.add_argument
        add("--stories", type=Path, required=True, help="gzipped text, a line <|endoftext|> after each story")
        add("--chat", type=Path, required=True, help="gzipped JSON lines of prompt and response")
        add("--run", type=Path, required=True, help="folder of the checkpoint, log and tokenizer")
        if name == "export":
            add("--out", type=Path, required=True, help="folder of the model")
            continue
        add("--workers", type=int, default=os.cpu_count(), help="processes, of one thread each")
        add("--resume", action="store_true", help="continue the checkpoint; of the rest --seconds counts")
        for option, default in _option_defaults().items():
            add(f"--{option.replace('_', '-')}", type=type(default), help=f"default {default}")
    return parser.parse_args()


def _option_defaults() -> dict[str, float]:
    from demo.train import Options

    return {field.name: field.default for field in fields(Options)}


def main() -> None:
    if sys.platform == "linux" and "MALLOC_MMAP_MAX_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _ALLOCATOR)
    arguments = _arguments()
    import torch

    from demo import data, export, model, train

    arguments.run.mkdir(parents=True, exist_ok=True)
    if arguments.command == "train" and not arguments.resume:
        given = {name: getattr(arguments, name) for name in _option_defaults()}
        options = train.Options(**{name: value for name, value in given.items() if value is not None})
        run = train.Run(arguments.run, model.Shape(), options)
    else:
        run = train.Run.load(arguments.run, getattr(arguments, "seconds", None))
    corpus = data.read_corpus(arguments.stories, arguments.chat, run.options.num_held_out)
    documents = train.prepare(arguments.run, corpus, run.shape.vocab_size, run.options.seed)
    if arguments.command == "train":
        torch.set_num_threads(1)
        train.train(run, documents, arguments.workers)
    else:
        export.export(run, documents, arguments.out)


if __name__ == "__main__":
    main()
