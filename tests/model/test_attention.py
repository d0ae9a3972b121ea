from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from model import attention
from model.attention import (
    CHUNK,
    directions,
    feature_map,
    linear_attention,
    phi,
    polynomial_features,
    random_features,
    recurrent_state,
    relu_features,
    softmax_attention,
)
from model.config import FeatureMap, ModelConfig

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


def test_phi_is_elu_plus_one():
    x = torch.tensor([-30.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(phi(x), torch.tensor([0.0, 0.36787944, 1.0, 3.0]))


def test_polynomial_features_are_the_squared_product():
    q, k, _ = tokens(9)
    found = polynomial_features(q) @ polynomial_features(k).mT
    torch.testing.assert_close(found, (q @ k.mT).square() / q.shape[-1])


def test_random_features_are_the_softmax_kernel_in_expectation():
    """More directions come closer (their error has heavy tails, so small vectors); those of a model never change."""
    q, k, _ = (x[0, 0] / 2 for x in tokens(20))
    exact = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    errors = []
    for count in (50, 800, 12_800):
        w = directions(count, q.shape[-1])
        errors.append(float((random_features(q, w) @ random_features(k, w).mT / exact - 1).abs().mean()))
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2 and errors[2] < 0.02
    w = directions(8, 4).numpy()
    expected = [0.83272250456431, -0.12908196227793906, -0.9967408206381972, -0.500242267819221]
    np.testing.assert_allclose(w[0], expected, rtol=1e-12)
    across = w[:4] @ w[:4].T
    assert abs(across - np.diag(across.diagonal())).max() < 1e-12


def test_relu_features_are_never_all_zero():
    assert float(relu_features(torch.full((3,), -5.0)).sum()) > 0


@pytest.mark.parametrize("name", get_args(FeatureMap))
def test_a_configuration_says_how_many_features_its_map_has(name):
    config = ModelConfig(key_dim=6, feature_map=name, random_features=11)
    found = feature_map(config)(torch.randn(2, 3, 6))
    assert found.shape == (2, 3, config.feature_dim)
    assert found.dtype == torch.float32


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
    monkeypatch.setattr(attention, "CHUNK", 3)
    q, k, v = (x[:1, :2, :7].requires_grad_() for x in tokens(7))
    assert torch.autograd.gradcheck(lambda q, k, v: linear_attention(phi(q), phi(k), v, EPS), (q, k, v))


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(phi(q), phi(k), v, EPS)


@pytest.mark.parametrize("form", [linear, softmax_attention])
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
    exact = linear(q, k, v)
    rounded = linear(q.float(), k.float(), v.float()).double()
    assert float((exact - rounded).abs().max()) < 1e-5


def test_the_recurrent_state_is_the_sum_over_tokens():
    _, k, v = tokens(11)
    S, z = recurrent_state(k, v)
    torch.testing.assert_close(S, sum(k[:, :, i, :, None] * v[:, :, i, None, :] for i in range(11)))
    torch.testing.assert_close(z, sum(k[:, :, i] for i in range(11)))


def test_softmax_attention_equals_its_definition():
    q, k, v = tokens(40)
    scores = q @ k.mT / 5 ** 0.5
    weights = scores.exp().tril()
    torch.testing.assert_close(softmax_attention(q, k, v), weights @ v / weights.sum(-1, keepdim=True),
                               rtol=1e-12, atol=1e-12)
