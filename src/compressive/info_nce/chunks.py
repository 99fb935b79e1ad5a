"""InfoNCE over candidates that are gathered from all processes in chunks."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from compressive.checks import full_precision
from compressive.distributed import (
    Pending,
    check_equal_rows,
    rank,
    start_gather,
    start_sum_to_owners,
)


class CandidateViews(NamedTuple):
    """The candidates of one tensor of queries, by the positions of their views."""

    query: int
    other: int  # the view whose row i is the positive of query i
    own: int | None = None  # the view whose other rows are negatives too


def both_directions(own: bool) -> tuple[CandidateViews, CandidateViews]:
    """Return the comparisons of queries X and Y with views X and Y."""
    return CandidateViews(0, 1, 0 if own else None), CandidateViews(1, 0, 1 if own else None)


def chunked_nll(
    queries: Sequence[Float[Tensor, "batch dim"]],
    views: Sequence[Float[Tensor, "batch dim"]],
    kappa: float,
    comparisons: Sequence[CandidateViews],
    chunk: int,
    *,
    decoupled: bool = False,
) -> tuple[Float[Tensor, " batch"], ...]:
    """Return InfoNCE of each comparison with the candidates of all processes, `chunk` rows of each.

    The next chunk is gathered while this one is compared. Neither all candidates nor all logits are
    ever in memory. The backward pass gathers and compares again, and sums the gradients of a chunk
    over processes while the next one is compared. `decoupled` leaves the positive out of the sum.
    """
    rows = torch.cat(tuple(views), dim=-1)
    check_equal_rows(rows)
    plan = _Plan(kappa, tuple(comparisons), len(queries), len(views), chunk, decoupled)
    nll = _ChunkedNll.apply(torch.cat(tuple(queries), dim=-1), rows, plan)
    assert isinstance(nll, Tensor)
    return nll.unbind()


def chunk_bytes(
    rows: int, ranks: int, dim: int, chunk: int, *, views: int = 2, itemsize: int = 4
) -> int:
    """Return the peak memory of `chunked_nll` beyond its inputs, with as many queries as views.

    `rows` are those of this process and `chunk` those of each process at a time. The number of all
    rows enters only through the chunk: rows * ranks * chunk logits.
    """
    local, gathered, logits = rows * views * dim, ranks * chunk * views * dim, rows * ranks * chunk
    scaled = rows * dim  # kappa * queries
    # Forward: queries and views in one tensor each, two chunks, logits and their exponentials.
    forward = 2 * local + scaled + 2 * gathered + 2 * logits
    # Backward: these and their gradients, two chunks with their gradients, and the logits.
    backward = 4 * local + scaled + 4 * gathered + chunk * views * dim + logits
    return itemsize * max(forward, backward)


class _Plan(NamedTuple):
    kappa: float
    comparisons: tuple[CandidateViews, ...]
    queries: int
    views: int
    chunk: int
    decoupled: bool

    def blocks(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield comparison, query and view, and whether row i is no candidate of query i."""
        for number, (query, other, own) in enumerate(self.comparisons):
            yield number, query, other, self.decoupled
            if own is not None:
                yield number, query, own, True


class _ChunkedNll(Function):
    """InfoNCE in chunks of candidates; both passes gather them."""

    @staticmethod
    def forward(ctx, z: Tensor, rows: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        queries, views = z.chunk(plan.queries, -1), rows.chunk(plan.views, -1)
        normalizer = z.new_full((len(plan.comparisons), len(z)), -math.inf)
        for start, stop, gathered in _gathered_chunks(rows, plan.chunk):
            parts = gathered.chunk(plan.views, -1)
            for number, query, view, is_masked in plan.blocks():
                logits = _block_logits(queries[query], parts[view], plan.kappa)
                if is_masked:
                    _mask_own_rows(logits, start, stop)
                merged = torch.logaddexp(normalizer[number], torch.logsumexp(logits, 1))
                normalizer[number] = merged
                del logits  # else this block stays in memory while the next one is computed
            del gathered, parts
        positives = [(queries[q] * views[other]).sum(-1) for q, other, _ in plan.comparisons]
        ctx.save_for_backward(z, rows, normalizer)
        return normalizer - plan.kappa * torch.stack(positives)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        z, rows, normalizer = ctx.saved_tensors
        plan, needs_rows = ctx.plan, ctx.needs_input_grad[1]
        queries, views = z.chunk(plan.queries, -1), rows.chunk(plan.views, -1)
        grad_z, grad_rows = torch.zeros_like(z), torch.zeros_like(rows) if needs_rows else None
        grad_queries = grad_z.chunk(plan.queries, -1)
        summed: tuple[int, int, Pending] | None = None  # of the chunk before
        with full_precision(grad):
            weight = (plan.kappa * grad).unsqueeze(-1)
            for start, stop, gathered in _gathered_chunks(rows, plan.chunk):
                parts = gathered.chunk(plan.views, -1)
                grad_chunk = torch.zeros_like(gathered) if needs_rows else None
                for number, query, view, is_masked in plan.blocks():
                    logits = _block_logits(queries[query], parts[view], plan.kappa)
                    share = logits.sub_(normalizer[number].unsqueeze(1)).exp_()
                    if is_masked:
                        _mask_own_rows(share, start, stop, 0.0)
                    share.mul_(weight[number])
                    grad_queries[query].addmm_(share, parts[view])
                    if grad_chunk is not None:
                        grad_chunk.chunk(plan.views, -1)[view].addmm_(share.T, queries[query])
                    del logits, share
                del gathered, parts
                if grad_rows is not None and grad_chunk is not None:
                    _store(summed, grad_rows)
                    summed = start, stop, start_sum_to_owners(grad_chunk)
            for number, (query, other, _) in enumerate(plan.comparisons):
                grad_queries[query].sub_(weight[number] * views[other])
                if grad_rows is not None:
                    positive = grad_rows.chunk(plan.views, -1)[other]
                    positive.sub_(weight[number] * queries[query])
            if grad_rows is not None:
                _store(summed, grad_rows)
        return grad_z, grad_rows, None


def _gathered_chunks(rows: Tensor, chunk: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield start, stop, and rows start to stop of all processes; the next ones are in flight."""
    bounds = [(start, min(start + chunk, len(rows))) for start in range(0, len(rows), chunk)]
    ahead = start_gather(rows[slice(*bounds[0])])
    for (start, stop), following in zip(bounds, [*bounds[1:], None], strict=True):
        pending = ahead
        if following is not None:
            ahead = start_gather(rows[slice(*following)])
        yield start, stop, pending.wait()


def _block_logits(queries: Tensor, candidates: Tensor, kappa: float) -> Tensor:
    return torch.mm(kappa * queries, candidates.T)


def _mask_own_rows(block: Tensor, start: int, stop: int, value: float = -math.inf) -> None:
    """Set the entries of rows start to stop with the same row of this process."""
    first = rank() * (stop - start)
    block[start:stop, first : first + stop - start].diagonal().fill_(value)


def _store(summed: tuple[int, int, Pending] | None, grad_rows: Tensor) -> None:
    if summed is not None:
        start, stop, pending = summed
        grad_rows[start:stop].add_(pending.wait())
