import torch

from linpix.model.attention.softmax import SoftmaxAttention, softmax_attention
from linpix.model.config import ModelConfig
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


def test_over_whole_sequences_it_equals_its_definition_whatever_the_padding_is():
    q, k, v = tokens(9)
    for length in (9, 4):
        scores = q[1, :, :length] @ k[1, :, :length].mT / 5**0.5
        for x in (q, k, v):
            x[1, :, length:] = 1e3
        found = SoftmaxAttention(ModelConfig()).parallel(
            0, q, k, v, lengths=torch.tensor([9, length])
        )
        torch.testing.assert_close(
            found[1, :, :length], scores.softmax(-1) @ v[1, :, :length], rtol=1e-12, atol=1e-12
        )
