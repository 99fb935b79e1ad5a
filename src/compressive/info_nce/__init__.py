"""InfoNCE, with all logits in memory, computed in blocks, or with candidates gathered in chunks."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from compressive.checks import (
    check_nonnegative,
    check_same_shape_2d,
    full_precision,
    in_func_transform,
    validates_inputs,
)
from compressive.distributed import gather, rank, world_size
from compressive.info_nce.chunks import CandidateViews, both_directions, chunked_nll

__all__ = ["CandidateViews", "both_directions", "candidate_logits", "candidate_nll", "chunk_rows"]
__all__ += ["chunked_nll", "info_nce", "log_candidates"]

# Number of logits above which they are computed in blocks, and logits per block: 256 MiB and 64 MiB
# of float32. Below the first it is faster to keep them; above it they dominate memory use.
_KEEP = 2**26
_LOGITS_PER_BLOCK = 2**24


@validates_inputs
def info_nce(
    z: Float[Tensor, "batch dim"],
    mu: Float[Tensor, "batch dim"],
    kappa: float,
    *,
    own: Float[Tensor, "batch dim"] | None = None,
    gather_chunk: int | None = None,
) -> Float[Tensor, " batch"]:
    """Return -log of b(z|y) over its sum over all candidates y: a bound on H(Y|Z) up to log K.

    `z` and `mu` hold unit vectors. Row i of `mu` is the positive of row i of `z`, and the other
    rows are negatives. `own`, the directions of z's own view, adds its other rows as negatives. The
    result is exact at any size: more than 2^26 logits are computed in blocks, and again in the
    backward pass. With several processes the blocks are chunks of the candidates: see `chunk_rows`.
    """
    z, *candidates = check_same_shape_2d(z=z, mu=mu, **({} if own is None else {"own": own}))
    check_nonnegative(kappa=kappa)
    with full_precision(z):
        if chunk := chunk_rows(len(z), own is not None, gather_chunk):
            compared = CandidateViews(0, 0, None if own is None else 1)
            (nll,) = chunked_nll([z], candidates, kappa, [compared], chunk)
            return nll
        everyone = torch.cat([gather(each) for each in candidates])
        return candidate_nll(z, everyone, kappa, own is not None)


def candidate_nll(
    z: Float[Tensor, "batch dim"],
    candidates: Float[Tensor, "candidates dim"],
    kappa: float,
    own: bool,
) -> Float[Tensor, " batch"]:
    """Return InfoNCE of gathered candidates: all of the other view, then all of the own view."""
    # torch.func cannot see into the blocks, so it gets all logits.
    if len(z) * len(candidates) > _KEEP and not in_func_transform():
        nll = _StreamedNll.apply(z, candidates, kappa, own)
        assert isinstance(nll, Tensor)
        return nll
    logits, positives = candidate_logits(z, candidates, kappa, own, 0, len(z))
    return F.cross_entropy(logits, positives, reduction="none")


@validates_inputs
def chunk_rows(batch: int, own: bool, gather_chunk: int | None) -> int:
    """Return how many rows of each process are gathered at a time; 0: all at once.

    `gather_chunk` is that number, or None to choose it: 0 in one process and for up to 2^26 logits
    per process and direction, else as many as give blocks of 2^24 logits.
    """
    if gather_chunk is not None and (not isinstance(gather_chunk, int) or gather_chunk < 0):
        rule = "gather_chunk must be a whole number of 0 or more, or None"
        raise ValueError(f"{rule}, got {gather_chunk!r}")
    # torch.func and torch.compile cannot see into an asynchronous collective.
    if gather_chunk == 0 or in_func_transform() or torch.compiler.is_compiling():
        return 0
    if gather_chunk is not None:
        return min(gather_chunk, batch)
    everyone = batch * world_size()
    if world_size() == 1 or batch * everyone * (2 if own else 1) <= _KEEP:
        return 0
    return min(batch, max(1, _LOGITS_PER_BLOCK // everyone))


def log_candidates(batch: int, own: bool) -> float:
    """Return log K; `own` adds the candidates of the own view except the image itself."""
    count = batch * world_size()
    return math.log(2 * count - 1 if own else count)


def candidate_logits(
    z: Tensor, candidates: Tensor, kappa: float, own: bool, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Return logits of rows start to stop of this process, and the columns of their positives."""
    logits = _Product.apply(kappa * z[start:stop], candidates)
    assert isinstance(logits, Tensor)
    first = rank() * len(z) + start
    positives = torch.arange(first, first + stop - start, device=z.device)
    if own:  # the same view of an image is no candidate
        itself = (positives + len(candidates) // 2).unsqueeze(1)
        if in_func_transform():  # vmap would loop over an in-place change
            return logits.scatter(1, itself, -math.inf), positives
        # A probability of exactly 0 has no gradient, so bypass autograd, which would copy.
        logits.detach().scatter_(1, itself, -math.inf)
    return logits, positives


class _Product(Function):
    """a @ b.T, whose gradient is also computed in the dtype of its inputs."""

    # A training step runs its backward pass under autocast, and a compiled one always does. The
    # gradient of a plain product would be computed in bfloat16 there.

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        a, b = ctx.saved_tensors
        with full_precision(grad):
            grad_a = grad @ b if ctx.needs_input_grad[0] else None
            grad_b = grad.T @ a if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


class _StreamedNll(Function):
    """InfoNCE in blocks of rows; the backward pass recomputes the logits of each block."""

    @staticmethod
    def forward(ctx, z: Tensor, candidates: Tensor, kappa: float, own: bool) -> Tensor:
        ctx.kappa, ctx.own = kappa, own
        nll, normalizer = z.new_empty(len(z)), z.new_empty(len(z))
        for start, stop in _blocks(z, candidates):
            logits, positives = candidate_logits(z, candidates, kappa, own, start, stop)
            normalizer[start:stop] = torch.logsumexp(logits, dim=1)
            positive = logits.gather(1, positives.unsqueeze(1)).squeeze(1)
            nll[start:stop] = normalizer[start:stop] - positive
        ctx.save_for_backward(z, candidates, normalizer)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        z, candidates, normalizer = ctx.saved_tensors
        grad_z, grad_candidates = torch.empty_like(z), torch.zeros_like(candidates)
        with full_precision(grad):
            for start, stop in _blocks(z, candidates):
                logits, positives = candidate_logits(z, candidates, ctx.kappa, ctx.own, start, stop)
                share = logits.sub_(normalizer[start:stop, None]).exp_()
                share.scatter_add_(1, positives.unsqueeze(1), share.new_full((stop - start, 1), -1))
                share.mul_(ctx.kappa * grad[start:stop, None])
                torch.mm(share, candidates, out=grad_z[start:stop])
                grad_candidates.addmm_(share.T, z[start:stop])
        return grad_z, grad_candidates, None, None


def _blocks(z: Tensor, candidates: Tensor) -> list[tuple[int, int]]:
    rows = max(1, _LOGITS_PER_BLOCK // len(candidates))
    return [(start, min(start + rows, len(z))) for start in range(0, len(z), rows)]
