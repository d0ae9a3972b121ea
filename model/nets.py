"""The network of a configuration."""

from functools import partial

from .conditional import Conditional
from .config import ModelConfig
from .experimental.pre_norm import PreNormLayer
from .experimental.reversible import Reversible, ReversibleLayer
from .transformer import Layer, Transformer


def net_for(
    config: ModelConfig, *, feed_forward_chunks: int = 1, dropout: float = 0.0
) -> Transformer:
    """A network with random weights. feed_forward_chunks, dropout: see Layer; neither changes what
    is computed in evaluation mode.
    """
    kind = Transformer
    if config.packed:
        kind = Conditional
    elif config.residual == "reversible":
        kind = Reversible
    make_layer = partial(layer_for(config), config, feed_forward_chunks, dropout)
    return kind(config, make_layer, dropout)


def layer_for(config: ModelConfig) -> type[Layer]:
    if config.residual == "reversible":
        return ReversibleLayer
    return PreNormLayer if config.norm == "pre" else Layer
