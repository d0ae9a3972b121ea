import torch

from linpix.model.attention.softmax import softmax_attention
from tests.model.attention.test_linear import tokens


def test_softmax_attention_equals_its_definition():
    q, k, v = tokens(40)
    scores = q @ k.mT / 5**0.5
    weights = scores.exp().tril()
    torch.testing.assert_close(
        softmax_attention(q, k, v),
        weights @ v / weights.sum(-1, keepdim=True),
        rtol=1e-12,
        atol=1e-12,
    )
