import pytest
import torch
from torch import Tensor

from model.attention import linear
from model.attention.linear import CHUNK, linear_attention, recurrent_state
from model.attention.softmax import softmax_attention
from model.features import phi

EPS = 1e-6
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]


def tokens(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, before the feature map, of two rows with three heads; D = 5 is not M = 4."""
    random = torch.Generator().manual_seed(length)
    return (torch.randn(2, 3, length, 5, generator=random, dtype=dtype),
            torch.randn(2, 3, length, 5, generator=random, dtype=dtype),
            torch.randn(2, 3, length, 4, generator=random, dtype=dtype))


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equations 8 and 9 with a causal mask, one position at a time; q and k after the feature map."""
    rows = []
    for i in range(q.shape[2]):
        similarity = (q[:, :, i, None] * k[:, :, :i + 1]).sum(-1)
        rows.append((similarity[..., None] * v[:, :, :i + 1]).sum(2) / (similarity.sum(-1)[..., None] + EPS))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_chunked_form_equals_the_definition(length):
    q, k, v = tokens(length)
    torch.testing.assert_close(linear_attention(phi(q), phi(k), v, EPS), definition(phi(q), phi(k), v),
                               rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_its_gradient_equals_that_of_the_definition(length):
    inputs = [x.requires_grad_() for x in tokens(length)]
    weight = torch.randn(2, 3, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient(form):
        q, k, v = inputs
        return torch.autograd.grad((form(phi(q), phi(k), v) * weight).sum(), inputs)

    torch.testing.assert_close(gradient(lambda q, k, v: linear_attention(q, k, v, EPS)), gradient(definition),
                               rtol=1e-10, atol=1e-10)


def test_its_gradient_equals_the_papers():
    """Equations 13 to 15 are about the numerator; a column of ones in v adds the denominator's."""
    length = CHUNK + 9
    q, k, v = tokens(length)
    q, k, v = phi(q).requires_grad_(), phi(k).requires_grad_(), v.requires_grad_()
    weight = torch.randn(2, 3, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = linear_attention(q, k, v, EPS)
    found = torch.autograd.grad((y * weight).sum(), (q, k, v))
    with torch.no_grad():
        denominator = (q * k.cumsum(2)).sum(-1, keepdim=True) + EPS
        ones = torch.ones_like(denominator)
        G = torch.cat([weight / denominator, -(weight * y).sum(-1, keepdim=True) / denominator], -1)
        V = torch.cat([v, ones], -1)
        q_grad, k_grad, v_grad = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(V)
        S = torch.zeros(2, 3, 5, 5, dtype=torch.float64)
        for i in range(length):
            S += k[:, :, i, :, None] * V[:, :, i, None, :]
            q_grad[:, :, i] = (S @ G[:, :, i, :, None])[..., 0]
        R = torch.zeros_like(S)
        for i in reversed(range(length)):
            R += q[:, :, i, :, None] * G[:, :, i, None, :]
            k_grad[:, :, i] = (R @ V[:, :, i, :, None])[..., 0]
            v_grad[:, :, i] = (R.mT @ k[:, :, i, :, None])[..., 0]
    torch.testing.assert_close(found, (q_grad, k_grad, v_grad[..., :4]), rtol=1e-10, atol=1e-10)


def test_its_gradient_equals_finite_differences(monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 3)
    q, k, v = (x[:1, :2, :7].requires_grad_() for x in tokens(7))
    assert torch.autograd.gradcheck(lambda q, k, v: linear_attention(phi(q), phi(k), v, EPS), (q, k, v))


def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(phi(q), phi(k), v, EPS)


@pytest.mark.parametrize("form", [chunked, softmax_attention])
@pytest.mark.parametrize("at", [0, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_a_token_leaves_no_trace_in_earlier_results(form, at):
    q, k, v = tokens(2 * CHUNK + 7, torch.float32)
    before = form(q, k, v)
    for x in (q, k, v):
        x[:, :, at:] *= -3
    after = form(q, k, v)
    assert torch.equal(before[:, :, :at], after[:, :, :at])
    assert not torch.equal(before[:, :, at:], after[:, :, at:])


def test_rounding_does_not_grow_over_a_long_image():
    q, k, v = tokens(3072)
    exact = chunked(q, k, v)
    rounded = chunked(q.float(), k.float(), v.float()).double()
    assert float((exact - rounded).abs().max()) < 1e-5


def test_the_recurrent_state_is_the_sum_over_tokens():
    _, k, v = tokens(11)
    S, z = recurrent_state(k, v)
    torch.testing.assert_close(S, sum(k[:, :, i, :, None] * v[:, :, i, None, :] for i in range(11)))
    torch.testing.assert_close(z, sum(k[:, :, i] for i in range(11)))
