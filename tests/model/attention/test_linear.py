from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linpix.model import ops
from linpix.model.attention.linear import of_one_length, whole_attention
from linpix.model.ops import CHUNK, phi

EPS = 1e-6
Form = Callable[[Tensor, Tensor, Tensor], Tensor]
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]


def tokens(
    length: int, dtype: torch.dtype = torch.float64, D: int = 5, M: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, before the feature map, of two rows with three heads; D is not
    M.
    """
    random = torch.Generator().manual_seed(length)
    return (
        torch.randn(2, 3, length, D, generator=random, dtype=dtype),
        torch.randn(2, 3, length, D, generator=random, dtype=dtype),
        torch.randn(2, 3, length, M, generator=random, dtype=dtype),
    )


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equations 8 and 9 with a causal mask, one position at a time; q and k after the feature
    map.
    """
    rows = []
    for i in range(q.shape[2]):
        similarity = (q[:, :, i, None] * k[:, :, : i + 1]).sum(-1)
        rows.append(
            (similarity[..., None] * v[:, :, : i + 1]).sum(2)
            / (similarity.sum(-1)[..., None] + EPS)
        )
    return torch.stack(rows, 2)


def packed(*xs: Tensor) -> tuple[Tensor, ...]:
    """(B, H, T, E) each, as packed sequences (N, H, E); and their offsets."""
    B, length = len(xs[0]), xs[0].shape[2]
    return *(x.transpose(1, 2).flatten(0, 1) for x in xs), torch.arange(B + 1) * length


def unpacked(y: Tensor, like: Tensor) -> Tensor:
    return y.unflatten(0, (len(like), -1)).transpose(1, 2)


def in_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The reference, through which torch differentiates."""
    return unpacked(ops.causal_attention_reference(*packed(q, k, v), EPS)[0], v)


def of_packed(operators) -> Callable[..., Tensor]:
    """Attention over packed sequences by operators, and its gradient by theirs."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, offsets):
            y, normaliser = operators.causal_attention(q, k, v, offsets, EPS)
            ctx.save_for_backward(q, k, v, offsets, y, normaliser)
            return y

        @staticmethod
        def backward(ctx, g):
            return *operators.causal_attention_backward(g.contiguous(), *ctx.saved_tensors), None

    applied: Callable[..., Tensor] = Function.apply
    return applied


def by(operators) -> Form:
    return lambda q, k, v: unpacked(of_packed(operators)(*packed(q, k, v)), v)


def by_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As training gets it: a compiled library's operator, or else the reference with the
    reference's gradient.
    """
    return unpacked(torch.ops.linpix.causal_attention(*packed(q, k, v), EPS)[0], v)


def form_called(name: str, request: pytest.FixtureRequest) -> Form:
    if name == "emulated":  # the CUDA operators on the host, their threads one after the other
        return by(request.getfixturevalue("emulated").operators)
    if name == "cuda":
        return lambda *given: of_one_length(*(x.cuda() for x in given), EPS).cpu()
    return {"reference": in_torch, "operator": by_operator}[name]


ON_GPU = [
    pytest.param("emulated", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.fixture(params=["reference", "operator", *ON_GPU])
def form(request) -> Form:
    return form_called(request.param, request)


@pytest.fixture(params=ON_GPU)
def on_gpu(request) -> Form:
    return form_called(request.param, request)


@pytest.fixture(params=["reference", "operator", pytest.param("emulated", marks=pytest.mark.slow)])
def form_of_packed(request) -> Callable[..., Tensor]:
    if request.param == "emulated":
        return of_packed(request.getfixturevalue("emulated").operators)
    operator = {
        "reference": ops.causal_attention_reference,
        "operator": torch.ops.linpix.causal_attention,
    }
    return lambda *given: operator[request.param](*given, EPS)[0]


def defined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return definition(phi(q), phi(k), v)


@pytest.mark.parametrize("length", LENGTHS)
def test_it_equals_the_definition(form, length):
    given = tokens(length)
    torch.testing.assert_close(form(*given), defined(*given), rtol=1e-12, atol=1e-12)


def gradient(form, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    y = form(*inputs)
    weight = torch.randn(
        y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).to(y.dtype)
    return torch.autograd.grad((y * weight).sum(), inputs)


@pytest.mark.parametrize("length", LENGTHS)
def test_its_gradient_equals_that_of_the_definition(form, length):
    given = tokens(length)
    torch.testing.assert_close(
        gradient(form, given), gradient(defined, given), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("D", "M"), [(5, 4), (8, 8), (16, 48), (32, 32), (33, 64)])
@pytest.mark.parametrize("length", [1, CHUNK + 1, 784])
def test_in_float32_it_differs_from_the_reference_by_rounding(form, length, D, M):
    random = torch.Generator().manual_seed(length)
    given = tuple(torch.randn(2, 3, length, size, generator=random) for size in (D, D, M))
    exact = tuple(x.double() for x in given)
    torch.testing.assert_close(form(*given), in_torch(*exact).float(), rtol=1e-5, atol=1e-5)
    found, expected = gradient(form, given), gradient(in_torch, exact)
    for ours, theirs in zip(found, expected, strict=True):
        # a sum over up to T tokens, each rounded: next to the largest
        torch.testing.assert_close(
            ours, theirs.float(), rtol=1e-5, atol=1e-5 * max(1.0, float(theirs.abs().max()))
        )


@pytest.mark.kernels
def test_in_bfloat16_it_is_computed_in_float32_and_rounded_once():
    rounded = tuple(x.bfloat16() for x in tokens(100))
    widened = tuple(x.float() for x in rounded)
    y = by_operator(*rounded)
    assert torch.equal(y, by_operator(*widened).bfloat16())
    for ours, theirs in zip(
        gradient(by_operator, rounded), gradient(by_operator, widened), strict=True
    ):
        assert ours.dtype == y.dtype == torch.bfloat16
        # what comes down is rounded too
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.01


@pytest.mark.kernels
@pytest.mark.parametrize(("D", "M"), [(5, 4), (16, 48), (32, 32), (33, 64)])
@pytest.mark.parametrize("length", [CHUNK + 1, 784])
def test_what_matrix_units_round_away_does_not_show_beside_the_rounding_of_results(
    on_gpu, length, D, M
):
    """In bfloat16, next to float64: the errors of the processor's float32, once it is rounded."""
    random = torch.Generator().manual_seed(length)
    given = tuple(
        torch.randn(2, 3, length, size, generator=random).bfloat16() for size in (D, D, M)
    )
    exact = tuple(x.double() for x in given)
    found, other, expected = (
        (form(*xs), *gradient(form, xs))
        for form, xs in ((on_gpu, given), (by_operator, given), (in_torch, exact))
    )
    assert float((found[0] != other[0]).double().mean()) < 0.05
    for ours, theirs, true in zip(found, other, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert float((ours - true).norm()) < 1.1 * float((theirs - true).norm())


@pytest.mark.parametrize("lengths", [[], [0], [1], [CHUNK, 0, 3], [2, CHUNK + 1, 1, 0]])
def test_packed_sequences_are_each_on_its_own(form_of_packed, lengths):
    random = torch.Generator().manual_seed(len(lengths))
    q, k, v, g = (
        torch.randn(sum(lengths), 3, size, generator=random, dtype=torch.float64)
        for size in (5, 5, 4, 4)
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0)

    def one_by_one(*xs: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in xs), strict=True)
        each = [
            defined(*(x.transpose(0, 1)[None] for x in part))[0].transpose(0, 1)
            for part in parts
            if len(part[0])
        ]
        return torch.cat([xs[2][:0], *each])

    found = [x.requires_grad_() for x in (q, k, v)]
    results = form_of_packed(*found, offsets), one_by_one(*found)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    if sum(lengths):
        torch.testing.assert_close(
            *(torch.autograd.grad((y * g).sum(), found) for y in results), rtol=1e-9, atol=1e-9
        )


def test_it_is_differentiated_once_and_its_normaliser_never():
    q, k, v, offsets = packed(*tokens(5))
    y, normaliser = torch.ops.linpix.causal_attention(q.requires_grad_(), k, v, offsets, EPS)
    assert not normaliser.requires_grad
    (gradient,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_schema_says_what_the_operator_does(dtype):
    q, k, v, _ = packed(*(x.to(dtype) for x in tokens(40)))
    given = (*(x.requires_grad_() for x in (q, k, v)), torch.tensor([0, 33, 80]), EPS)
    torch.library.opcheck(torch.ops.linpix.causal_attention.default, given)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x[0], r"q must have shape \(N, H, D\), got \(3, 5\)"),
        ("q", lambda x: x.half(), "must be float32, bfloat16 or float64, got Half"),
        ("k", lambda x: x[:79], r"k must have shape \(80, 3, 5\), got \(79, 3, 5\)"),
        ("k", lambda x: x.float(), "k must have dtype Double, got Float"),
        ("v", lambda x: x[:, :2], r"v must have shape \(80, 3, 4\), got"),
        ("v", lambda x: x.mT.contiguous().mT, "the last dimension of v must be contiguous"),
        (
            "offsets",
            lambda x: x + 1,
            "offsets must go from 0 to 80, the number of tokens, got 1 to 81",
        ),
        ("offsets", lambda x: x[[0, 1, 0, 2]], "offsets must ascend, got 0 after 40"),
        ("offsets", lambda x: x.float(), "offsets must have dtype Long, got Float"),
    ],
)
def test_invalid_arguments_are_an_error_that_says_what_was_given(name, change, message):
    given = dict(
        zip(("q", "k", "v", "offsets"), (x.contiguous() for x in packed(*tokens(40))), strict=True)
    )
    with pytest.raises(RuntimeError, match=message):
        torch.ops.linpix.causal_attention(*(given | {name: change(given[name])}).values(), EPS)


def test_nothing_the_size_of_all_states_is_made():
    """Of T tokens, no T x D x M: what is kept for the gradient grows by q, k, v, y and one
    normaliser a token.
    """
    kept = []
    for length in (512, 1024):
        q, k, v = (torch.randn(length, 2, 32, requires_grad=True) for _ in range(3))
        offsets = torch.tensor([0, length])
        sizes: dict[int, int] = {}

        def keep(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            torch.ops.linpix.causal_attention(q, k, v, offsets, EPS)
        kept.append(sum(sizes.values()) - offsets.nbytes)
    assert kept[1] == 2 * kept[0] == 1024 * 2 * (4 * 32 + 1) * 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("D", "M"), [(5, 4), (33, 64)])
def test_what_threads_compute_does_not_depend_on_their_order(emulated, D, M, dtype):
    """A result that changes with it lacks a barrier."""
    found = []
    given = tokens(70, dtype, D, M)
    try:
        for backwards in (False, True):
            emulated.backwards(backwards)
            found.append((by(emulated.operators)(*given), *gradient(by(emulated.operators), given)))
    finally:
        emulated.backwards(False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.slow
def test_heads_too_large_for_a_block_are_refused(emulated):
    q, k, v = (torch.randn(3, 1, size) for size in (65, 65, 8))
    with pytest.raises(
        RuntimeError, match="heads must be of size 64 at most on a GPU, got 65 and 8"
    ):
        emulated.operators.causal_attention(q, k, v, torch.tensor([0, 3]), EPS)


# without a causal mask


def whole_defined(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Equation 4, one query after another, over the tokens that are not padding."""
    result = torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    for b, length in enumerate(lengths.tolist()):
        for i in range(length):
            similarity = (phi(q[b, :, i, None]) * phi(k[b, :, :length])).sum(-1)
            result[b, :, i] = (similarity[..., None] * v[b, :, :length]).sum(1) / (
                similarity.sum(-1)[:, None] + EPS
            )
    return result


def whole(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """whole_attention with zeros for the results of padding, which mean nothing."""
    real = torch.arange(q.shape[2]) < lengths[:, None]
    return whole_attention(q, k, v, lengths, EPS) * real[:, None, :, None]


@pytest.mark.parametrize("lengths", [(9, 9), (9, 4), (1, 9)])
def test_over_whole_sequences_it_equals_the_definition_whatever_the_padding_is(lengths):
    given, lengths = tokens(9), torch.tensor(lengths)
    expected = whole_defined(*given, lengths)
    torch.testing.assert_close(whole(*given, lengths), expected, rtol=1e-12, atol=1e-12)
    for x in given:
        x[1, :, lengths[1] :] = 1e3
    torch.testing.assert_close(whole(*given, lengths), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(9, 9), (9, 4), (1, 9)])
def test_its_gradient_over_whole_sequences_equals_that_of_the_definition(lengths):
    given, lengths = tokens(9), torch.tensor(lengths)
    exact = gradient(lambda *given: whole_defined(*given, lengths), given)
    found = gradient(lambda *given: whole(*given, lengths), given)
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
    single = gradient(lambda *given: whole(*given, lengths), tuple(x.float() for x in given))
    torch.testing.assert_close(single, tuple(x.float() for x in exact), rtol=1e-4, atol=1e-5)
