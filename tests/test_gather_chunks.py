"""InfoNCE with candidates gathered in chunks: equal to all at once, with the stated memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled_methods import tiny
from conftest import unit_vectors
from processes import printed, together
from torch import Tensor

from compressive import info_nce
from compressive.info_nce import chunks
from compressive.methods.dcl import dcl_loss
from compressive.objectives import csimclr_loss, simclr_loss

PER_RANK, DIM = 7, 8
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64 sums in another order
CONTRASTIVE = ("simclr", "c-simclr", "moco-v3", "c-moco-v3", "dcl")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def losses(inputs: Inputs, chunk: int | None) -> dict[str, Tensor]:
    """Return the values per image of every objective with candidates."""
    r_x, r_y, z_x, z_y = inputs
    found = {}
    for own in (True, False):
        kind: dict[str, Any] = {"own_view_negatives": own, "gather_chunk": chunk}
        drawn = {"z_x": z_x, "z_y": z_y, "kappa_e": 50.0}
        found[f"simclr {own}"] = torch.stack(simclr_loss(r_x, r_y, **kind)[1:3])
        found[f"dcl {own}"] = torch.stack(dcl_loss(r_x, r_y, **kind)[1:3])
        negatives = r_y if own else None
        found[f"info_nce {own}"] = info_nce.info_nce(
            z_x, r_x, 5.0, own=negatives, gather_chunk=chunk
        )
        for weight in (None, "likelihood", "rank"):
            made = csimclr_loss(r_x, r_y, **drawn, **kind, beta=0.3, adaptive_weight=weight)
            betas = [torch.as_tensor(beta) for beta in (made.beta_x, made.beta_y)]
            found[f"c-simclr {own} {weight}"] = torch.stack([made.loss, *map(torch.mean, betas)])
    return found


def values_and_gradients(inputs: Inputs, chunk: int | None) -> dict[str, tuple[Tensor, ...]]:
    """Return each objective and its gradients, weighted differently for each image."""
    given: Any = tuple(each.clone().requires_grad_() for each in inputs)
    results = {}
    for name, value in losses(given, chunk).items():
        weights = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view_as(value)
        grads = torch.autograd.grad((value * weights).sum(), given, allow_unused=True)
        results[name] = (value.detach(), *(each for each in grads if each is not None))
    return results


def rows(ranks: int, dtype: torch.dtype = torch.float64) -> Inputs:
    made = unit_vectors(4, ranks * PER_RANK, DIM, dtype=dtype)
    return made[0], made[1], made[2], made[3]


@pytest.mark.parametrize("chunk", [1, 3, PER_RANK, 100])
def test_one_process_matches_all_at_once(chunk: int) -> None:
    """Three rows at a time leave a last chunk of one row."""
    whole, found = (values_and_gradients(rows(1), each) for each in (0, chunk))
    torch.testing.assert_close(found, whole, **EXACT)


def test_float32_matches_all_at_once() -> None:
    """Float32 rounds logits of up to 10 to 1e-6; gradients sum some of them."""
    whole, found = (values_and_gradients(rows(1, torch.float32), each) for each in (0, 3))
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_probabilities_far_apart_do_not_overflow() -> None:
    """At kappa = 1e4, exp(logit) overflows even in float64; the sums are merged as logarithms."""
    z, mu = unit_vectors(2, 9, DIM)
    nll = [info_nce.info_nce(z, mu, 1e4, gather_chunk=chunk) for chunk in (0, 2)]
    assert nll[0].isfinite().all()
    torch.testing.assert_close(nll[1], nll[0], rtol=1e-12, atol=1e-8)


def step_of(name: str, chunk: str, mine: slice) -> tuple[Tensor, ...]:
    method = tiny(name, f"train.gather_chunk={chunk}").double()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, 3, 8, 8, dtype=torch.float64, generator=generator)[:, mine]
    torch.manual_seed(5)
    loss = method((x, y), 0.5).loss
    loss.backward()
    return loss.detach(), *(p.grad for p in method.parameters() if p.grad is not None)


def worker(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    own: Any = tuple(each[rank * PER_RANK :][:PER_RANK] for each in rows(ranks))
    whole = values_and_gradients(own, 0)
    for chunk in (1, 3, PER_RANK):
        torch.testing.assert_close(values_and_gradients(own, chunk), whole, **EXACT)
    torch.testing.assert_close(values_and_gradients(own, None), whole, rtol=0, atol=0)
    mine = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
    for name in CONTRASTIVE:
        pair = (step_of(name, chunk, mine) for chunk in ("0", "1"))
        torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-11)
    uneven = unit_vectors(2, 3 + rank, DIM)
    with pytest.raises(ValueError, match=r"rows.* 3, 4"):
        simclr_loss(*uneven, gather_chunk=2)
    torch.save(whole, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_match_gathering_all_at_once(ranks: int, tmp_path: Path) -> None:
    """Also the methods: their weights get the same gradient. `none` is bitwise the old path."""
    together(worker, (ranks, str(tmp_path)), ranks)
    each = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    r_x, r_y, *_ = rows(ranks)
    joined = simclr_loss(r_x, r_y).nll_x
    found = torch.cat([one["simclr True"][0][0] for one in each])
    torch.testing.assert_close(found, joined, **EXACT)


class EmulatedRanks:
    """Collectives of ranks that run one after another: gather from all, collect the sums."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, everyone: Tensor, ranks: int) -> None:
        self.everyone, self.rank = everyone.view(ranks, -1, everyone.shape[-1]), 0
        self.summed = torch.zeros_like(self.everyone)
        self.gathered = self.sent = 0  # rows of this rank so far in this pass
        monkeypatch.setattr(chunks, "start_gather", self.start_gather)
        monkeypatch.setattr(chunks, "start_sum_to_owners", self.start_sum)
        monkeypatch.setattr(chunks, "rank", lambda: self.rank)
        monkeypatch.setattr(chunks, "check_equal_rows", lambda rows: None)

    def start_gather(self, rows: Tensor) -> chunks.Pending:
        first = self.gathered % self.everyone.shape[1]
        self.gathered += len(rows)
        found = self.everyone[:, first : first + len(rows)]
        torch.testing.assert_close(found[self.rank], rows, rtol=0, atol=0)
        return chunks.Pending(found.flatten(0, 1), rows, None)

    def start_sum(self, rows: Tensor) -> chunks.Pending:
        count = len(rows) // len(self.everyone)
        first = self.sent % self.everyone.shape[1]
        self.sent += count
        self.summed[:, first : first + count] += rows.view(len(self.everyone), count, -1)
        return chunks.Pending(torch.zeros_like(rows[:count]), rows, None)


@pytest.mark.parametrize("decoupled", [False, True])
def test_64_ranks_match_one_process(monkeypatch: pytest.MonkeyPatch, decoupled: bool) -> None:
    """Each rank has 5 of 320 images and gathers 2 of each rank at a time."""
    ranks, each = 64, 5
    mu = list(unit_vectors(2, ranks * each, DIM))
    pairs = chunks.both_directions(True)
    given: Any = [one.clone().requires_grad_() for one in mu]
    loss = simclr_loss if not decoupled else dcl_loss
    expected = loss(*given)
    wanted = torch.autograd.grad((expected.nll_x + expected.nll_y).mean(), given)
    emulated = EmulatedRanks(monkeypatch, torch.cat(mu, -1), ranks)
    values, local = [], []
    for emulated.rank in range(ranks):
        mine: Any = [one[emulated.rank * each :][:each].clone().requires_grad_() for one in mu]
        nll = chunks.chunked_nll(mine, mine, 10.0, pairs, 2, decoupled=decoupled)
        values.append(torch.stack(nll))
        local.append(torch.cat(torch.autograd.grad(sum(nll).mean(), mine), -1))  # pyright: ignore
    found = (torch.cat(local) + emulated.summed.flatten(0, 1)) / ranks  # as DDP averages
    torch.testing.assert_close(torch.cat(values, 1)[0], expected.nll_x, **EXACT)
    # Inputs are unit vectors, so the loss normalizes them again, which projects its gradient.
    for one, grad, direct in zip(mu, wanted, found.chunk(2, -1), strict=True):
        tangent = direct - (direct * one).sum(-1, keepdim=True) * one
        torch.testing.assert_close(tangent, grad, **EXACT)


def test_chunks_start_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_nce, "world_size", lambda: 64)
    assert info_nce.chunk_rows(64, True, None) == 0  # the paper's batch of 4,096
    assert info_nce.chunk_rows(724, True, None) == 0  # 67,092,480 of 2^26 logits
    assert info_nce.chunk_rows(725, True, None) == 2**24 // (725 * 64)
    assert info_nce.chunk_rows(1024, True, None) == 256  # 65,536 images
    assert info_nce.chunk_rows(1024, False, None) == 0
    assert info_nce.chunk_rows(2**20, True, None) == 1
    assert info_nce.chunk_rows(1024, True, 0) == 0
    assert info_nce.chunk_rows(1024, True, 100) == 100
    monkeypatch.setattr(info_nce, "world_size", lambda: 1)
    assert info_nce.chunk_rows(2**20, True, None) == 0
    assert torch.func.vmap(lambda x: x * info_nce.chunk_rows(8, True, 4))(torch.ones(2)).sum() == 0


def test_invalid_chunk_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"gather_chunk.*-1"):
        simclr_loss(*unit_vectors(2, 4, DIM), gather_chunk=-1)
    with pytest.raises(ValueError, match=r"gather_chunk.*2\.5"):
        info_nce.chunk_rows(4, True, 2.5)  # pyright: ignore[reportArgumentType]


def test_next_chunk_is_gathered_while_this_one_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the order of events: g gathers, w waits, c compares, s starts and e ends a sum."""
    events: list[str] = []

    class Recorded:
        def __init__(self, letter: str) -> None:
            self.letter = letter

        def wait(self) -> None:
            events.append(self.letter)

    def recorded(function: Callable[..., Any], start: str, end: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(start)
            result = function(*arguments)
            return result._replace(work=Recorded(end)) if end else result

        return call

    for name, start, end in (
        ("start_gather", "g", "w"),
        ("start_sum_to_owners", "s", "e"),
        ("_block_logits", "c", ""),
    ):
        monkeypatch.setattr(chunks, name, recorded(getattr(chunks, name), start, end))
    z, mu = (each.requires_grad_() for each in unit_vectors(2, 6, DIM))
    nll = info_nce.info_nce(z, mu, 5.0, gather_chunk=2)
    assert "".join(events) == "ggwcgwcwc"
    events.clear()
    nll.sum().backward()
    assert "".join(events) == "ggwcsgwceswcese"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_chunks_do_not_wait_for_the_device() -> None:
    r_x, r_y = torch.randn(2, 64, 32, device="cuda", requires_grad=True).unbind()
    torch.cuda.set_sync_debug_mode("error")
    try:
        simclr_loss(r_x, r_y, gather_chunk=7).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The "fake" backend has the shapes of 64 ranks but copies nothing. The profiler sees every
# allocation, also those inside of operations.
MEMORY = """
import sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from compressive.objectives import simclr_loss
from compressive.info_nce.chunks import both_directions, chunk_bytes, chunked_nll

def peak(prof):
    found = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(found, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most

ranks, rows, dim, chunk = map(int, sys.argv[1:])
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
torch.manual_seed(0)
r = [torch.nn.functional.normalize(torch.randn(rows, dim)).requires_grad_() for _ in range(2)]
for whole in (False, True):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        if whole:
            simclr_loss(*r, gather_chunk=0).loss.backward()
        else:
            sum(chunked_nll(r, r, 10.0, both_directions(True), chunk)).sum().backward()
    print(peak(prof))
print(chunk_bytes(rows, ranks, dim, chunk))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "rows_", "dim", "chunk"),
    [(64, 64, 32, 4), (64, 64, 32, 16), (64, 16, 128, 4), (8, 256, 64, 8), (256, 64, 32, 1)],
)
def test_peak_memory_follows_the_formula(ranks: int, rows_: int, dim: int, chunk: int) -> None:
    """A matrix library may pack its arguments: on ARM it copies one view of a chunk twice."""
    words = map(str, (ranks, rows_, dim, chunk))
    measured, whole, predicted = map(float, printed(MEMORY, *words).split())
    packed = 2 * ranks * chunk * dim * 4
    assert 0.9 * predicted < measured < 1.05 * predicted + packed, measured / predicted
    assert measured < 0.7 * whole, measured / whole


def test_batch_of_65536_over_64_ranks_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory does not depend on the number of ranks, if the chunk is chosen."""
    found = set()
    for ranks in (16, 64, 256):
        monkeypatch.setattr(info_nce, "world_size", lambda ranks=ranks: ranks)
        chunk = info_nce.chunk_rows(1024, True, 2**14 // ranks)
        found.add(chunks.chunk_bytes(1024, ranks, 256, chunk) // 10**7)
    assert found == {21}  # 211 MB; 674 MB if all candidates are gathered at once
