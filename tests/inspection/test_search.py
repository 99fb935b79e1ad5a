"""Nearest neighbors in blocks equal a full sort, and those of FAISS equal ours."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from compressive.inspection import search
from compressive.inspection.search import nearest, nearest_exact, nearest_faiss


def unit(count: int, dim: int = 8, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=random), dim=1)


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (64, 5), (1000, 1000)])
def test_blocks_equal_a_full_sort(rows: int, columns: int) -> None:
    queries, bank = unit(50, seed=1), unit(60)
    found = nearest_exact(queries, bank, 6, rows=rows, columns=columns)
    cosine = queries.double().numpy() @ bank.double().numpy().T
    order = np.argsort(-cosine, axis=1)[:, :6]
    assert np.array_equal(found.index.numpy(), order)
    assert np.allclose(found.cosine, np.take_along_axis(cosine, order, 1), atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (16, 16), (13, 1000)])
def test_an_image_is_not_its_own_neighbor(rows: int, columns: int) -> None:
    bank = unit(40)
    found = nearest_exact(bank, bank, 3, skip_self=True, rows=rows, columns=columns)
    cosine = bank.double() @ bank.double().mT
    expected = cosine.fill_diagonal_(-2).topk(3).indices
    assert torch.equal(found.index, expected)


def test_few_images_have_few_neighbors() -> None:
    bank = unit(3)
    assert nearest(bank, bank, 9, skip_self=True).index.shape == (3, 2)
    assert nearest(bank[:1], bank[:1], 9, skip_self=True).index.shape == (1, 0)
    assert nearest(bank[:0], bank, 2).index.shape == (0, 2)


@pytest.mark.parametrize("skip_self", [False, True])
def test_faiss_with_all_lists_equals_the_exact_search(skip_self: bool) -> None:
    pytest.importorskip("faiss")
    bank = unit(500, 16)
    exact = nearest_exact(bank, bank, 5, skip_self=skip_self)
    found = nearest_faiss(bank, bank, 5, skip_self=skip_self, lists=4, probes=4)
    assert torch.equal(found.index, exact.index)
    assert torch.allclose(found.cosine, exact.cosine, atol=1e-5)


def test_large_sets_use_faiss_or_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = unit(30)
    monkeypatch.setattr(search, "FAISS_FROM", 30)
    monkeypatch.setattr(search, "_faiss", lambda: None)
    with pytest.warns(UserWarning, match=r"compressive\[faiss\]"):
        assert nearest(bank, bank, 2).index.shape == (30, 2)
    with pytest.raises(ValueError, match=r"compressive\[faiss\]"):
        nearest_faiss(bank, bank, 2)
    used = []
    monkeypatch.setattr(search, "_faiss", lambda: True)
    monkeypatch.setattr(search, "nearest_faiss", lambda *_, **__: used.append(1))
    nearest(bank, bank, 2)
    assert used
