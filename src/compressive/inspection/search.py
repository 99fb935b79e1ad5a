"""Exact nearest neighbors by cosine, in blocks of bounded memory; FAISS for millions of images."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

FAISS_FROM = 1_000_000  # images from which FAISS is used if it is installed
_BLOCK_ROWS, _BLOCK_COLUMNS = 2048, 2**15  # a block of similarities: 256 MiB
_PROBES = 64  # lists that FAISS searches for each image


class Neighbors(NamedTuple):
    """Cosine and index of the nearest images of each query, nearest first."""

    cosine: Float[Tensor, "queries count"]
    index: Int[Tensor, "queries count"]


def nearest(
    queries: Float[Tensor, "queries dim"],
    bank: Float[Tensor, "bank dim"],
    count: int,
    *,
    skip_self: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Neighbors:
    """Return the `count` nearest unit vectors in the bank; `skip_self`: query i is bank row i."""
    if len(bank) >= FAISS_FROM:
        if _faiss() is not None:
            return nearest_faiss(queries, bank, count, skip_self=skip_self)
        hint = "install compressive[faiss] for an approximate search, which is faster"
        warnings.warn(f"exact search among {len(bank):,} images takes long; {hint}", stacklevel=1)
    return nearest_exact(
        queries, bank, count, skip_self=skip_self, device=device, progress=progress
    )


def nearest_exact(
    queries: Float[Tensor, "queries dim"],
    bank: Float[Tensor, "bank dim"],
    count: int,
    *,
    skip_self: bool = False,
    device: torch.device | str = "cpu",
    rows: int = _BLOCK_ROWS,
    columns: int = _BLOCK_COLUMNS,
    progress: Callable[[int, int], None] | None = None,
) -> Neighbors:
    """Compare every query with every vector of the bank; keep the best of each block."""
    count = max(0, min(count, len(bank) - skip_self))
    device, found = torch.device(device), list[Neighbors]()
    # On a GPU the whole bank is there, which saves copies; a million vectors of 512 need 2 GB.
    bank = bank.to(device)
    for start in range(0, len(queries), rows):
        some = queries[start : start + rows].to(device)
        best = Neighbors(some.new_zeros(len(some), 0), torch.zeros(len(some), 0, dtype=torch.long))
        best = Neighbors(best.cosine, best.index.to(device))
        for first in range(0, len(bank), columns):
            block = some @ bank[first : first + columns].mT
            if skip_self:
                _hide_self(block, start, first)
            cosine, index = block.topk(min(count, block.shape[1]), dim=1)
            cosine = torch.cat([best.cosine, cosine], 1)
            index = torch.cat([best.index, index + first], 1)
            cosine, kept = cosine.topk(min(count, cosine.shape[1]), dim=1)
            best = Neighbors(cosine, index.gather(1, kept))
        found.append(Neighbors(best.cosine.cpu(), best.index.cpu()))
        if progress is not None:
            progress(min(start + rows, len(queries)), len(queries))
    if not found:
        return Neighbors(torch.zeros(0, count), torch.zeros(0, count, dtype=torch.long))
    return Neighbors(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _hide_self(block: Tensor, start: int, first: int) -> None:
    """Set the similarity of each query with itself to minus infinity."""
    low, high = max(start, first), min(start + block.shape[0], first + block.shape[1])
    same = torch.arange(low, max(low, high), device=block.device)
    block[same - start, same - first] = -torch.inf


def nearest_faiss(
    queries: Float[Tensor, "queries dim"],
    bank: Float[Tensor, "bank dim"],
    count: int,
    *,
    skip_self: bool = False,
    lists: int = 0,
    probes: int = _PROBES,
) -> Neighbors:
    """Search with FAISS: approximate, exact if `probes` is the number of lists."""
    faiss = _faiss()
    if faiss is None:
        raise ValueError("FAISS is not installed; run: pip install 'compressive[faiss]'")
    count = max(0, min(count, len(bank) - skip_self))
    lists = lists or max(1, round(4 * len(bank) ** 0.5))
    index: Any = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(bank.shape[1]), bank.shape[1], lists, faiss.METRIC_INNER_PRODUCT
    )
    vectors = bank.float().contiguous().numpy()
    index.train(vectors[:: max(1, len(vectors) // (64 * lists))])
    index.add(vectors)
    index.nprobe = min(probes, lists)
    cosine, at = index.search(queries.float().contiguous().numpy(), count + skip_self)
    found = Neighbors(torch.from_numpy(cosine), torch.from_numpy(at))
    return _without_self(found, count) if skip_self else found


def _without_self(found: Neighbors, count: int) -> Neighbors:
    """Drop each query from its own neighbors, or the last one if it is not among them."""
    is_self = found.index == torch.arange(len(found.index))[:, None]
    order = is_self.long().sort(dim=1, stable=True).indices[:, :count]
    return Neighbors(found.cosine.gather(1, order), found.index.gather(1, order))


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        return None
    return faiss
