"""Text to train on: by default the sources of the Python standard library, which every machine has.

A BPE that is trained on the text tokenises it. The tokens are cached in a file, `bpe-<hash of the text>-<vocabulary>`.
"""

import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Text beyond this limit is not read. Tokenising 12 MB of Python with 128256 entries took 11 s on 2 busy cores, and time
# grows with the text, so the limit means less than 20 s.
MAX_CHARACTERS = 20_000_000
# This token is between documents. Its id is 0.
SEPARATOR = "<|endoftext|>"
# The smallest vocabulary has 256 bytes, the separator, and some merges.
MIN_VOCAB = 512
# The least number of tokens of a text that TRL trains on.
MIN_DOCUMENT = 32
# The seed of the weights and of the order of the text.
SEED = 0
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and the name of their source."""

    name: str
    documents: list[str]


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus: the file of its tokens (uint32), their number, and one more than the largest of them."""

    path: Path
    count: int
    entries: int


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/tigon`, or `~/.cache/tigon`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon"


def read_text(source: Path | None = None) -> Corpus:
    """Return the text of a file, of all text files in a folder, or (None) of the Python standard library's sources.

    Hidden files and files with a zero byte are left out. Bytes that are not UTF-8 become replacement characters.

    Raises:
        ValueError: `source` does not exist, or has no text.
    """
    name = str(source) if source else f"Python {sysconfig.get_python_version()} standard library"
    root = source or Path(sysconfig.get_paths()["stdlib"])
    skipped = set() if source else _SKIPPED_FOLDERS
    documents: list[str] = []
    characters_left = MAX_CHARACTERS
    for path in [root] if root.is_file() else sorted(root.rglob("*" if source else "*.py")):
        parts = path.relative_to(root).parts
        if not path.is_file() or skipped.intersection(parts) or any(part.startswith(".") for part in parts):
            continue
        text = path.read_text("utf-8", errors="replace")[:characters_left]
        if text.strip() and "\0" not in text:
            documents.append(text)
            characters_left -= len(text)
    if not documents:
        raise ValueError(f"must be a file or a folder of text, got {name!r}")
    return Corpus(name, documents)


def split_paragraphs(corpus: Corpus) -> Corpus:
    """Return the corpus with a document for each paragraph; in Python, that is a function or a class.

    A paragraph begins after an empty line, at a line that is not indented.

    >>> split_paragraphs(Corpus("", ["import os\\n\\ndef f():\\n    a\\n\\n    b\\n"])).documents
    ['import os', 'def f():\\n    a\\n\\n    b\\n']
    """
    return Corpus(corpus.name, [text for document in corpus.documents for text in re.split(r"\n\n+(?=\S)", document)])


def _encode(documents: list[str], vocab: int) -> np.ndarray:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    encodings = tokenizer.encode_batch(documents, add_special_tokens=False)
    return np.concatenate([np.asarray([*encoding.ids, 0], dtype=np.uint32) for encoding in encodings])


def tokenise(corpus: Corpus, vocab: int, cache: Path | None = None) -> Tokens:
    """Return the corpus as tokens of a byte-level BPE of at most `vocab` entries, which is trained on it and cached."""
    digest = hashlib.sha256("\0".join(corpus.documents).encode("utf-8", errors="replace")).hexdigest()
    cache = cache_folder() if cache is None else cache
    path = cache / f"bpe-{digest[:16]}-{vocab}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # A reader never sees an incomplete file, because the file is renamed when it is complete.
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            np.save(Path(folder, path.name), _encode(corpus.documents, vocab))
            os.replace(Path(folder, path.name), path)
    tokens = np.load(path, mmap_mode="r")
    return Tokens(path, len(tokens), int(tokens.max()) + 1)


def draw_documents(path: Path, count: int, longest: int, seed: int) -> list[list[int]]:
    """Return the first `longest` tokens of documents that have at least 32, in an order that depends on the seed alone.

    Raises:
        ValueError: the text has fewer than `count` such documents.
    """
    tokens = np.load(path, mmap_mode="r")
    ends = np.flatnonzero(tokens == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    (long_enough,) = np.nonzero(ends - starts >= MIN_DOCUMENT)
    if len(long_enough) < count:
        raise ValueError(
            f"train: text must have {count} paragraphs of at least {MIN_DOCUMENT} tokens, got {len(long_enough)}"
        )
    order = torch.randperm(len(long_enough), generator=torch.Generator().manual_seed(seed))[:count]
    return [tokens[starts[i] : min(ends[i], starts[i] + longest)].tolist() for i in long_enough[order.numpy()]]


def batches(path: Path, batch: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of token ids without end, [batch, seq] int64, in an order that depends on the seed alone. The text
    is cut into windows of `seq` tokens. All windows are drawn once before any is drawn again."""
    tokens = np.load(path, mmap_mode="r")
    windows = tokens[: len(tokens) // seq * seq].reshape(-1, seq)
    if not len(windows):
        raise ValueError(f"text must be at least one sequence long: seq={seq}, got {len(tokens)} tokens")
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += torch.randperm(len(windows), generator=generator).tolist()
        batch_order, order = order[:batch], order[batch:]
        yield torch.from_numpy(windows[batch_order].astype(np.int64))
