import numpy as np
import torch

from linpix.model.experimental.features import directions, polynomial_features, random_features
from linpix.model.ops import phi
from tests.model.attention.test_linear import tokens


def test_phi_is_elu_plus_one():
    x = torch.tensor([-30.0, -1.0, 0.0, 2.0])
    torch.testing.assert_close(phi(x), torch.tensor([0.0, 0.36787944, 1.0, 3.0]))


def test_polynomial_features_are_the_squared_product():
    q, k, _ = tokens(9)
    found = polynomial_features(q) @ polynomial_features(k).mT
    torch.testing.assert_close(found, (q @ k.mT).square() / q.shape[-1])


def test_random_features_are_the_softmax_kernel_in_expectation():
    """More directions come closer (their error has heavy tails, so small vectors); those of a model
    never change.
    """
    q, k, _ = (x[0, 0] / 2 for x in tokens(20))
    exact = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    errors = []
    for count in (50, 800, 12_800):
        w = directions(count, q.shape[-1])
        errors.append(
            float((random_features(q, w) @ random_features(k, w).mT / exact - 1).abs().mean())
        )
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2 and errors[2] < 0.02
    w = directions(8, 4).numpy()
    expected = [0.83272250456431, -0.12908196227793906, -0.9967408206381972, -0.500242267819221]
    np.testing.assert_allclose(w[0], expected, rtol=1e-12)
    across = w[:4] @ w[:4].T
    assert abs(across - np.diag(across.diagonal())).max() < 1e-12
