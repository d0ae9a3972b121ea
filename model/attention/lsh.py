"""LSH attention (Reformer, section 2 and appendix A): each token attends to the tokens that share
its hash bucket.

Queries are also keys (shared QK, keys scaled to length one). Sorting by bucket puts the tokens of a
bucket side by side, and each chunk of the sorted sequence attends to itself and to the chunk before
it. Sorting looks at all tokens, so a token's chunk depends on later tokens too. A result is a sum
over earlier tokens only, but later tokens influence which of them are in it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from . import Attention, present

# subtracted from a token's score with itself: it attends to itself only if nothing else is allowed
SELF = 1e5


def rotations(
    rounds: int, dim: int, buckets: int, generator: torch.Generator | None = None
) -> Tensor:
    """Normal random numbers, (rounds, D, buckets / 2), by which lsh_attention hashes; buckets is 1,
    or even.
    """
    if buckets != 1 and (buckets < 2 or buckets % 2):
        raise ValueError(f"buckets must be 1 or an even number, got {buckets}")
    # a seed gives the same numbers on every device
    device = "cpu" if generator is not None else None
    return torch.randn(rounds, dim, buckets // 2, generator=generator, device=device)


def lsh_attention(
    qk: Tensor, v: Tensor, rotation: Tensor, chunk: int, lengths: Tensor | None = None
) -> Tensor:
    """Causal attention among tokens that share a bucket and are at most a chunk apart in one of the
    rounds.

    qk: (B, H, T, D) · v: (B, H, T, M) · rotation: see rotations · chunk: number of sorted tokens
    that attend to each other and to the chunk before theirs; T is padded to a multiple · returns
    (B, H, T, M). It is exactly softmax attention with temperature 1 / sqrt(D) over the union of the
    tokens seen in any round (equations 12 to 16): a pair that is seen in N rounds has 1 / N of its
    weight in each. N counts rounds in which one token of the pair sees the other; the same hash
    alone is not enough.
    lengths: as in Attention.parallel; with them it is not causal, and a token also attends to the
             later ones of its chunk.
    """
    rounds, length = len(rotation), qk.shape[2]
    total = -(-length // chunk) * chunk
    batch = qk.shape[:2]
    qk, v = (F.pad(x.flatten(0, 1), (0, 0, 0, total - length)) for x in (qk, v))  # (n, T, ...)
    position = torch.arange(total, device=qk.device)
    bucket = _buckets(qk, rotation)  # (n, rounds, T)
    real = (
        position < length
        if lengths is None
        else present(lengths, total).repeat_interleave(batch[1], 0)[:, None]
    )
    bucket = torch.where(real, bucket, bucket.max() + 1)  # padding comes last
    order = (bucket * total + position).argsort(-1)
    place = order.argsort(-1)  # a token's index after sorting
    keys = F.normalize(qk, dim=-1)

    def sort(x: Tensor) -> Tensor:
        """(n, T, E) in each round's order, by chunks: (n, rounds, chunks, chunk, E)."""
        index = order.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, index).unflatten(1, (rounds, -1, chunk))

    def window(x: Tensor, fill: float) -> Tensor:
        """Each chunk and the one before it: (..., chunks, chunk, E) -> (..., chunks, 2 *
        chunk, E).
        """
        before = torch.cat([torch.full_like(x[:, :, :1], fill), x[:, :, :-1]], 2)
        return torch.cat([before, x], 3)

    # A token's seat in a round is its bucket and its chunk in one number. A token sees another if
    # its seat minus the other's is 0 or 1. There is no token before the first chunk.
    chunks = total // chunk
    seat = (bucket * (chunks + 2) + place // chunk).to(torch.int32)  # (n, rounds, T)

    def together(own: Tensor, seen: Tensor) -> Tensor:
        return (own - seen == 0) | (own - seen == 1)

    here = seat.gather(-1, order).unflatten(-1, (-1, chunk))[..., None]  # in the round that sorts
    allowed = together(here, window(here, 2**30).mT)  # (..., chunk, 2 * chunk)
    facts = torch.cat([position.to(torch.int32).expand(len(qk), 1, -1), seat], 1).transpose(1, 2)
    own, seen = sort(facts)[..., :, None, :], window(sort(facts), 2**30)[..., None, :, :]
    distance = own[..., 0] - seen[..., 0]
    scores = sort(qk) @ window(sort(keys), 0).mT / qk.shape[-1] ** 0.5
    # N of equation 16; with all rounds stacked, compiled code would select the round at every
    # element
    if rounds > 1:
        N = sum(
            (together(own[..., r], seen[..., r]).int() for r in range(1, rounds + 1)),
            torch.zeros_like(distance),
        )
        scores = scores - N.clamp(min=1).to(qk.dtype).log()
    scores = scores - SELF * (distance == 0)
    if lengths is None:
        allowed = allowed & (distance >= 0)
    scores = scores.masked_fill(~allowed, -torch.inf)
    mass = scores.logsumexp(-1, keepdim=True)  # the round's z
    read = (scores - mass).exp() @ window(sort(v), 0)
    back = place[..., None]
    read = read.flatten(2, 3).gather(2, back.expand(-1, -1, -1, v.shape[-1]))  # (n, rounds, T, M)
    weight = mass.flatten(2, 3).gather(2, back).softmax(1)
    result: Tensor = (weight * read).sum(1)[:, :length].unflatten(0, batch)
    return result


def _buckets(qk: Tensor, rotation: Tensor) -> Tensor:
    """Index of the largest among the rotated axes and their opposites, (n, rounds, T)."""
    if not rotation.shape[-1]:
        return torch.zeros(len(qk), len(rotation), qk.shape[1], dtype=torch.int64, device=qk.device)
    rotated = torch.einsum("ntd,rdb->nrtb", qk, rotation.to(qk))
    return torch.cat([rotated, -rotated], -1).argmax(-1)


class LSHAttention(Attention):
    """LSH attention with new hashes at each pass in training, and fixed hashes otherwise."""

    shared_qk = True
    options = ("lsh_rounds", "lsh_buckets", "lsh_chunk")
    exception = "Sorting by hash looks at later sub-pixels too"

    def parallel(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        generator = None if training else torch.Generator().manual_seed(layer)
        c = self.config
        rotation = rotations(c.lsh_rounds, c.key_dim, c.lsh_buckets, generator)
        return lsh_attention(q, v, rotation, c.lsh_chunk, lengths)

    @property
    def facts(self) -> dict[str, str]:
        c = self.config
        return {
            "hashing": (
                f"{c.lsh_rounds} round{'s' * (c.lsh_rounds > 1)}, {c.lsh_buckets} buckets, chunks"
                f" of {c.lsh_chunk}"
            )
        }
