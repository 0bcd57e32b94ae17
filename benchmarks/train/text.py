"""Text to train on: by default the sources of the Python standard library, which every machine has.

A BPE that is trained on the text tokenises it, and the tokens are cached.

A cache entry is a folder, `bpe-<hash of the text>-<vocabulary>`, with `tokenizer.json` and `tokens.npy` (uint32). It is
written under a temporary name and renamed, so that a reader never sees an incomplete entry.
"""

import hashlib
import logging
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

# Text beyond this limit is not read. Tokenising 12 MB of Python with 128256 entries took 11 s on 2 busy cores, and time
# grows with the text, so the limit means less than 20 s. The longest preset reads 250 thousand tokens, about 1 MB.
MAX_CHARACTERS = 20_000_000
# This token is between documents. Its id is 0.
SEPARATOR = "<|endoftext|>"
# The smallest vocabulary has 256 bytes, the separator, and some merges.
MIN_VOCAB = 512
_CACHE_FORMAT = "1"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order. With `is_truncated`, only the first MAX_CHARACTERS of the text are here."""

    name: str
    documents: list[str]
    is_truncated: bool

    @property
    def characters(self) -> int:
        return sum(map(len, self.documents))


@dataclass(frozen=True)
class Tokens:
    """A tokenised corpus: the file of its tokens, their number, and the number of entries of the BPE."""

    path: Path
    count: int
    entries: int
    is_cached: bool


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/tigon`, or `~/.cache/tigon`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon"


def _find_files(source: Path | None) -> tuple[str, list[Path]]:
    """Return the name of a source, and its files in order."""
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
    """Return the text of a file, of all text files in a folder, or (None) of the Python standard library's sources.

    Hidden files and files with a zero byte are left out. Bytes that are not UTF-8 become replacement characters.

    Raises:
        ValueError: `source` does not exist, or has no text.
    """
    name, files = _find_files(source)
    documents: list[str] = []
    characters_left = MAX_CHARACTERS
    for path in files:
        with path.open("rb") as file:
            # A character has at most four bytes.
            data = file.read(4 * characters_left)
        if not data.strip() or b"\0" in data:
            continue
        document = data.decode("utf-8", errors="replace")[:characters_left]
        documents.append(document)
        characters_left -= len(document)
        if characters_left == 0:
            break
    if not documents:
        raise ValueError(f"must hold a file of text, got {name!r}: {len(files)} files, none of them text")
    return Corpus(name, documents, is_truncated=characters_left == 0)


def _key(corpus: Corpus, vocab: int) -> str:
    digest = hashlib.sha256(_CACHE_FORMAT.encode())
    for document in corpus.documents:
        data = document.encode("utf-8", errors="replace")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return f"bpe-{digest.hexdigest()[:16]}-{vocab}"


def _load(folder: Path, is_cached: bool) -> Tokens:
    from tokenizers import Tokenizer

    entries = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    return Tokens(folder / "tokens.npy", len(tokens), entries, is_cached)


def _find(folder: Path) -> Tokens | None:
    """Return the tokens of a cache entry, or None if it is absent or damaged."""
    try:
        return _load(folder, is_cached=True)
    except Exception:
        # `tokenizers` raises plain Exception if the file is absent or damaged.
        logging.getLogger("tigon").debug("There are no tokens in %s.", folder, exc_info=True)
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
    """Return the corpus as tokens of a byte-level BPE of at most `vocab` entries, which is trained on it and cached.

    The BPE has fewer entries than `vocab` if the text has no more pairs to merge.
    """
    cache = cache_folder() if cache is None else cache
    folder = cache / _key(corpus, vocab)
    tokens = _find(folder)
    if tokens is not None:
        return tokens
    cache.mkdir(parents=True, exist_ok=True)
    unfinished_folder = Path(tempfile.mkdtemp(prefix=folder.name, dir=cache))
    try:
        _build(corpus, vocab, unfinished_folder)
        # If another process was faster, use its entry, which may have readers. Remove a damaged entry.
        if _find(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished_folder.rename(folder)
    finally:
        shutil.rmtree(unfinished_folder, ignore_errors=True)
    return _load(folder, is_cached=False)


def batches(path: Path, batch: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of token ids without end, [batch, seq] int64, in an order that depends on the seed alone.

    The text is cut into windows of `seq` tokens. All windows are drawn once before any is drawn again.
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
        batch_order, order = order[:batch], order[batch:]
        yield torch.from_numpy(windows[batch_order].astype(np.int64))
