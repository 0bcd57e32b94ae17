"""Tests of the text, the tokenizer, the cache and the batches."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")

from benchmarks.train import text as module  # noqa: E402
from benchmarks.train.text import Corpus, batches, cache_folder, read_text, tokenise  # noqa: E402


def test_a_folder_is_read_file_by_file_in_order(text):
    corpus = read_text(text)
    assert [document[:9] for document in corpus.documents] == ["def funct", "the quick"]
    assert not corpus.is_truncated


def test_a_single_file_is_read(text):
    assert read_text(text / "b.txt").documents == [(text / "b.txt").read_text()]


def test_the_standard_library_has_enough_text_and_the_same_each_time():
    corpus = read_text()
    assert corpus.characters > 2_000_000
    assert corpus == read_text()
    assert "standard library" in corpus.name


def test_text_beyond_the_limit_is_left_out(text, monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)
    corpus = read_text(text)
    assert corpus.is_truncated
    assert corpus.characters == 1000


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    assert read_text(tmp_path).documents == ["caf�"]


@pytest.mark.parametrize("name", ["nothing here", "empty"])
def test_a_source_without_text_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"must .* got .*{name}"):
        read_text(tmp_path / name)


def test_tokens_decode_to_the_text(text, tmp_path):
    corpus = read_text(text)
    tokens = tokenise(corpus, 600, tmp_path / "cache")
    tokenizer = tokenizers.Tokenizer.from_file(str(tokens.path.parent / "tokenizer.json"))
    ids = np.load(tokens.path)
    assert tokens.count == len(ids)
    assert tokens.entries == tokenizer.get_vocab_size() <= 600
    assert ids.max() < 600
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "".join(
        document + module.SEPARATOR for document in corpus.documents
    )


def test_the_cache_has_an_entry_for_each_text_and_vocabulary(text, tmp_path):
    cache = tmp_path / "cache"
    corpus = read_text(text)
    first, again = tokenise(corpus, 600, cache), tokenise(corpus, 600, cache)
    assert not first.is_cached
    assert again.is_cached
    assert again.path == first.path
    assert not tokenise(corpus, 700, cache).is_cached
    (text / "b.txt").write_text("other text")
    assert not tokenise(read_text(text), 600, cache).is_cached
    # No unfinished entry remains.
    assert len(list(cache.iterdir())) == 3


def test_the_entry_of_a_faster_process_is_used(text, tmp_path, monkeypatch):
    corpus, build = read_text(text), module._build
    faster: list[tuple[int, Path]] = []

    def build_after_another(*arguments: Any) -> None:
        monkeypatch.setattr(module, "_build", build)
        path = tokenise(corpus, 600, tmp_path / "cache").path
        faster.append((path.stat().st_ino, path))
        build(*arguments)

    monkeypatch.setattr(module, "_build", build_after_another)
    slower = tokenise(corpus, 600, tmp_path / "cache")
    assert [(slower.path.stat().st_ino, slower.path)] == faster
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"other content"], ids=["empty", "garbage"])
@pytest.mark.parametrize("file", ["tokens.npy", "tokenizer.json"])
def test_a_damaged_entry_is_built_again(text, tmp_path, file, damage):
    corpus = read_text(text)
    first = tokenise(corpus, 600, tmp_path / "cache")
    expected = np.load(first.path)
    (first.path.parent / file).write_bytes(damage)
    again = tokenise(corpus, 600, tmp_path / "cache")
    assert not again.is_cached
    np.testing.assert_array_equal(np.load(again.path), expected)


def test_cache_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/tigon")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tigon"


def test_batches_follow_the_seed_and_use_every_window_once(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(67, dtype=np.uint32))
    # The text has 8 windows of 8 tokens, and 3 more tokens.
    draw = lambda seed, count: torch.stack(list(islice(batches(tmp_path / "tokens.npy", 2, 8, seed), count)))
    # [8 steps, 2, 8]: all windows twice.
    first = draw(0, 8)
    assert first.dtype == torch.int64
    torch.testing.assert_close(first, draw(0, 8))
    assert not torch.equal(first, draw(1, 8))
    for epoch in first.split(4):
        assert sorted(epoch.flatten().tolist()) == list(range(64))


def test_a_batch_may_be_larger_than_the_text(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.uint32))
    assert next(batches(tmp_path / "tokens.npy", 5, 8, 0)).shape == (5, 8)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.uint32))
    with pytest.raises(ValueError, match="seq=32, got 20 tokens"):
        next(batches(tmp_path / "tokens.npy", 1, 32, 0))


def test_the_bpe_is_smaller_if_the_text_has_no_more_pairs(tmp_path):
    tokens = tokenise(Corpus("tiny", ["abc abc"], is_truncated=False), 32_000, tmp_path)
    assert 257 <= tokens.entries < 300
