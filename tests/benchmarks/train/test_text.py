"""Tests of the text, the tokens, the cache and the batches."""

from itertools import islice

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from benchmarks.train import text as module
from benchmarks.train.text import Corpus, batches, draw_documents, read_text, split_paragraphs, tokenise


def test_files_are_read_in_order(text):
    assert [document[:9] for document in read_text(text).documents] == ["def funct", "the quick"]
    assert read_text(text / "b.txt").documents == [(text / "b.txt").read_text()]


def test_the_standard_library_has_enough_text_without_its_tests():
    corpus = read_text()
    assert sum(map(len, corpus.documents)) > 2_000_000
    assert "standard library" in corpus.name
    assert not any(document.startswith('"""Unit tests') for document in corpus.documents)


def test_hidden_and_binary_files_and_long_text_are_left_out_and_bytes_that_are_not_utf8_are_replaced(
    text, tmp_path, monkeypatch
):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / ".hidden").write_text("hidden")
    (folder / "binary").write_bytes(b"a\0b")
    assert read_text(folder).documents == ["caf\N{REPLACEMENT CHARACTER}"]
    monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)
    assert sum(map(len, read_text(text).documents)) == 1000


@pytest.mark.parametrize("name", ["nothing here", "empty"])
def test_a_source_without_text_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"must .* got .*{name}"):
        read_text(tmp_path / name)


def test_documents_are_tokens_that_end_with_a_separator(text, tmp_path):
    corpus = read_text(text)
    tokens = tokenise(corpus, 600, tmp_path / "cache")
    ids = np.load(tokens.path)
    assert (tokens.count, tokens.entries) == (len(ids), ids.max() + 1)
    assert 257 < tokens.entries <= 600
    assert (ids == 0).sum() == len(corpus.documents)
    assert ids[-1] == 0
    # Merged pairs make the text shorter than its bytes.
    assert len(ids) < 0.7 * sum(len(document.encode()) for document in corpus.documents)


def test_the_cache_has_a_file_for_each_text_and_vocabulary(text, tmp_path, monkeypatch):
    cache, corpus = tmp_path / "cache", read_text(text)
    first = tokenise(corpus, 600, cache)
    tokenise(corpus, 700, cache)
    tokenise(Corpus("other", ["other text"]), 600, cache)
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(module, "_encode", lambda *_: pytest.fail("the tokens are in the cache"))
    assert tokenise(corpus, 600, cache) == first


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
    assert next(batches(tmp_path / "tokens.npy", 20, 8, 0)).shape == (20, 8)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.uint32))
    with pytest.raises(ValueError, match="seq=32, got 20 tokens"):
        next(batches(tmp_path / "tokens.npy", 1, 32, 0))


def test_long_paragraphs_are_drawn_without_their_separators(tmp_path):
    path = tmp_path / "tokens.npy"
    lengths = [40, 31, 32, 100, 0, 50]
    np.save(path, np.concatenate([[*range(1000 * i + 1, 1000 * i + 1 + n), 0] for i, n in enumerate(lengths)]))
    documents = draw_documents(path, 4, 64, seed=0)
    assert sorted(map(len, documents)) == [32, 40, 50, 64]
    assert {tuple(document) for document in documents} >= {tuple(range(1, 41)), tuple(range(3001, 3065))}
    assert documents == draw_documents(path, 4, 64, seed=0)
    assert documents[:2] == draw_documents(path, 2, 64, seed=0)
    assert documents != draw_documents(path, 4, 64, seed=1)
    with pytest.raises(ValueError, match="text must have 5 paragraphs of at least 32 tokens, got 4"):
        draw_documents(path, 5, 64, seed=0)


def test_the_functions_of_a_module_are_paragraphs():
    source = "import os\n\n\ndef f():\n    x = 1\n\n    return x\n\n@g\nclass A:\n    pass\n"
    documents = split_paragraphs(Corpus("name", [source, "text"])).documents
    assert documents == ["import os", "def f():\n    x = 1\n\n    return x", "@g\nclass A:\n    pass\n", "text"]
