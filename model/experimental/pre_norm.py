"""Layers with a LayerNorm before each sub-layer. They train more steadily than post-norm ones."""

from torch import Tensor

from ..transformer import Attend, Layer


class PreNormLayer(Layer):
    def normed_attention(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        return self.attention(self.norm1(x), index, attend)

    def normed_feed_forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.norm2(x))

    def forward(self, x: Tensor, index: int, attend: Attend) -> Tensor:
        x = x + self.dropout(self.normed_attention(x, index, attend))
        return x + self.dropout(self.in_chunks(self.normed_feed_forward, x))
