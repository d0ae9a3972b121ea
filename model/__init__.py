"""LinPix models: what a model is, and how it is run on a whole image at once or one token at a
time.

| word            | means                                                              | letter   |
| --------------- | ------------------------------------------------------------------ | -------- |
| sub-pixel       | one byte of an image in raster order                               | T        |
| token           | what one step predicts: a sub-pixel, or C sub-pixels of one pixel  | t, C     |
| row             | one image taking part in this step                                 | B        |
| slot            | one place in the state pool, held by one image; slot 0 for padding | N        |
| recurrent state | S (sum of phi(k) v^T) and z (sum of phi(k)) of every layer         | S, z     |
| feature map     | phi(x) = elu(x) + 1 or another, applied to queries and keys        | phi      |
| prefill         | fold the given tokens into the state at once                       |          |
| decode, step    | decode is a run of steps; one step adds one token to every row     |          |
| quantum         | up to k steps in one call, between which rows join and leave       | k        |
| bits/dim        | loss in nats / ln 2 / T                                            |          |

Layers, heads, key dim, value dim and mixtures are L, H, D, M and K.

Begin with transformer.py, the plain model; conditional.py adds known pixels, classes and
background, and net_for in nets.py says which of them a configuration asks for. What no shipped
model uses is in experimental/.
"""

from .checkpoint import load

__all__ = ["load"]
