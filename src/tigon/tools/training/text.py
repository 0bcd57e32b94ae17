"""Text to train on: found on every machine, tokenised by a BPE trained on it, kept in a cache.

A cache entry is a folder, `bpe-<hash of the text>-<vocabulary>`, with `tokenizer.json` and `tokens.npy` (uint32). It is
written beside its place and renamed into it, so a reader never sees half of one.
"""

import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["MIN_VOCAB", "Corpus", "Tokens", "batches", "cache_folder", "read_text", "tokenise"]

# Text beyond this is not read. 12 MB of Python with 128256 entries asked for took 2 busy cores 11 s, and time grows
# with the text, so this stays under 20 s; the longest preset sees 250 thousand tokens, about 1 MB.
MAX_CHARACTERS = 20_000_000
SEPARATOR = "<|endoftext|>"  # between documents; entry 0
MIN_VOCAB = 512  # 256 bytes, the separator, and some merges
_FORMAT = "1"  # of the cache
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. `truncated`: there was more than MAX_CHARACTERS."""

    name: str
    documents: list[str]
    truncated: bool

    @property
    def characters(self) -> int:
        return sum(map(len, self.documents))


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus: where its tokens are, how many, and how many entries the BPE came to have."""

    path: Path
    count: int
    entries: int
    cached: bool


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tigon`, or `~/.cache/tigon`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon"


def _files(source: Path | None) -> tuple[str, list[Path]]:
    if source is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
        ]
        return f"Python {sysconfig.get_python_version()} standard library", sorted(files)
    if source.is_file():
        return str(source), [source]
    if source.is_dir():
        files = [
            path
            for path in source.rglob("*")
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)
        ]
        return str(source), sorted(files)
    raise ValueError(f"must be a file or a folder that exists, got {str(source)!r}")


def read_text(source: Path | None = None) -> Corpus:
    """The text of a file, of all text files under a folder, or (None) of the Python standard library's own sources.

    Hidden files and files with a zero byte are left out; what is not UTF-8 is read with replacement characters.

    Raises:
        ValueError: `source` does not exist, or there is no text in it.
    """
    name, files = _files(source)
    documents: list[str] = []
    room = MAX_CHARACTERS
    for path in files:
        with path.open("rb") as file:
            data = file.read(4 * room)  # a character has at most four bytes
        if not data.strip() or b"\0" in data:
            continue
        document = data.decode("utf-8", errors="replace")[:room]
        documents.append(document)
        room -= len(document)
        if room == 0:
            break
    if not documents:
        raise ValueError(f"must hold a file of text, got {name!r}: {len(files)} files, none of them text")
    return Corpus(name, documents, truncated=room == 0)


def _key(corpus: Corpus, vocab: int) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    for document in corpus.documents:
        data = document.encode("utf-8", errors="replace")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return f"bpe-{digest.hexdigest()[:16]}-{vocab}"


def _load(folder: Path, cached: bool) -> Tokens:
    from tokenizers import Tokenizer

    entries = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    return Tokens(folder / "tokens.npy", len(tokens), entries, cached)


def _find(folder: Path) -> Tokens | None:
    try:
        return _load(folder, cached=True)
    except Exception:  # absent, or damaged: `tokenizers` raises plain Exception for both
        return None


def _build(corpus: Corpus, vocab: int, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    separator = np.zeros(1, dtype=np.uint32)
    pieces = []
    for encoding in tokenizer.encode_batch(corpus.documents, add_special_tokens=False):
        pieces += [np.asarray(encoding.ids, dtype=np.uint32), separator]
    np.save(folder / "tokens.npy", np.concatenate(pieces))


def tokenise(corpus: Corpus, vocab: int, cache: Path | None = None) -> Tokens:
    """The corpus as tokens of a byte-level BPE of at most `vocab` entries trained on it, from the cache or made now.

    The BPE has fewer entries than asked for where the text has no more pairs to merge.
    """
    cache = cache_folder() if cache is None else cache
    folder = cache / _key(corpus, vocab)
    found = _find(folder)
    if found is not None:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=cache))
    try:
        _build(corpus, vocab, unfinished)
        if _find(folder) is None:  # or another process was faster, and may be reading it
            shutil.rmtree(folder, ignore_errors=True)  # damaged, if it is there
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return _load(folder, cached=False)


def batches(path: Path, batch: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of token ids, [batch, seq] int64, in an order that depends on the seed alone.

    The text is cut into windows of `seq` tokens, which are drawn without replacement, over and over.
    """
    tokens = np.load(path, mmap_mode="r")
    windows = tokens[: len(tokens) // seq * seq].reshape(-1, seq)
    if not len(windows):
        raise ValueError(f"text must be at least one sequence long: seq={seq}, got {len(tokens)} tokens")
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += torch.randperm(len(windows), generator=generator).tolist()
        chosen, order = order[:batch], order[batch:]
        yield torch.from_numpy(windows[chosen].astype(np.int64))
