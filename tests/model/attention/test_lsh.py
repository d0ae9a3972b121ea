"""LSH attention against its definition, token by token, and against full attention."""

import pytest
import torch
from torch import Tensor

from linpix.model.attention.lsh import SELF, lsh_attention, rotations

LENGTHS = [1, 7, 8, 9, 40]


def tokens(length: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(length)
    return (
        torch.randn(2, 3, length, 6, generator=random, dtype=torch.float64),
        torch.randn(2, 3, length, 4, generator=random, dtype=torch.float64),
    )


def turns(rounds: int, buckets: int) -> Tensor:
    return rotations(rounds, 6, buckets, torch.Generator().manual_seed(rounds))


def seen(q: Tensor, rotation: Tensor, chunk: int, causal: bool = True) -> set[tuple[int, int]]:
    """Pairs (i, j) of one head that some round allows: alike in bucket, one chunk apart at most,
    and causally j not later."""
    pairs = set()
    for round_ in rotation:
        axes = q @ round_.double()
        hashes = (
            torch.cat([axes, -axes], -1).argmax(-1).tolist() if round_.shape[-1] else [0] * len(q)
        )
        order = sorted(range(len(q)), key=lambda i: (hashes[i], i))
        chunk_of = {i: at // chunk for at, i in enumerate(order)}
        pairs |= {
            (i, j)
            for i in range(len(q))
            for j in range(i + 1 if causal else len(q))
            if hashes[i] == hashes[j] and 0 <= chunk_of[i] - chunk_of[j] <= 1
        }
    return pairs


def definition(qk: Tensor, v: Tensor, rotation: Tensor, chunk: int, causal: bool = True) -> Tensor:
    """Softmax over the union of what is seen; over itself only where there is nothing else."""
    result = torch.empty_like(v)
    for row in range(len(qk)):
        for head in range(qk.shape[1]):
            q, values = qk[row, head], v[row, head]
            keys, pairs = q / q.norm(dim=-1, keepdim=True), seen(q, rotation, chunk, causal)
            for i in range(len(q)):
                others = [j for j in range(len(q)) if j != i and (i, j) in pairs] or [i]
                weights = (keys[others] @ q[i] / q.shape[-1] ** 0.5).softmax(0)
                result[row, head, i] = weights @ values[others]
    return result


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("buckets", [1, 2, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_several_rounds_together_are_attention_over_the_union_of_what_they_see(
    length, buckets, rounds
):
    qk, v = tokens(length)
    rotation = turns(rounds, buckets)
    torch.testing.assert_close(
        lsh_attention(qk, v, rotation, 8), definition(qk, v, rotation, 8), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("buckets", [1, 2, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_over_whole_sequences_it_is_attention_over_the_union_whatever_the_padding_is(
    length, buckets, rounds
):
    qk, v = tokens(40)
    rotation = turns(rounds, buckets)
    qk[1, :, length:], v[1, :, length:] = 1e3, 1e3
    found = lsh_attention(qk, v, rotation, 8, torch.tensor([40, length]))
    for row, count in enumerate((40, length)):
        alone = qk[row : row + 1, :, :count], v[row : row + 1, :, :count]
        torch.testing.assert_close(
            found[row : row + 1, :, :count],
            definition(*alone, rotation, 8, causal=False),
            rtol=1e-9,
            atol=1e-9,
        )


@pytest.mark.parametrize("length", LENGTHS)
def test_with_one_bucket_and_one_chunk_it_is_full_attention_with_shared_queries_and_keys(length):
    qk, v = tokens(length)
    keys = qk / qk.norm(dim=-1, keepdim=True)
    scores = qk @ keys.mT / qk.shape[-1] ** 0.5 - SELF * torch.eye(length)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    for rounds in (1, 3):
        found = lsh_attention(qk, v, turns(rounds, 1), length)
        torch.testing.assert_close(found, scores.softmax(-1) @ v, rtol=1e-9, atol=1e-9)


def test_a_later_token_changes_which_tokens_are_seen_and_nothing_else():
    """The exception to causality: with buckets that fit into their chunks there is none."""
    qk, v = tokens(40)
    rotation, changed = turns(2, 8), tokens(41)[0][:, :, :40]
    later = torch.arange(40)[:, None] >= 25
    for chunk, causal in ((40, True), (4, False)):
        before = lsh_attention(qk, v, rotation, chunk)
        after = lsh_attention(
            torch.where(later, changed, qk), torch.where(later, -v, v), rotation, chunk
        )
        same = torch.isclose(before, after, rtol=1e-9, atol=1e-9)[:, :, :25].all()
        assert bool(same) == causal
    values_only = lsh_attention(qk, torch.where(later, -v, v), rotation, 4)
    torch.testing.assert_close(values_only[:, :, :25], lsh_attention(qk, v, rotation, 4)[:, :, :25])


def test_its_gradient_equals_finite_differences():
    qk, v = (x[:1, :1, :11].requires_grad_() for x in tokens(40))
    rotation = turns(2, 4)
    assert torch.autograd.gradcheck(lambda qk, v: lsh_attention(qk, v, rotation, 4), (qk, v))
