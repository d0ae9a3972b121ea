"""What a plugin imports: `register_attention` with the classes `Attention` and `Recurrent`, and
`register_feature_map`. docs/plugins.md explains them.
"""

from linpix.model.attention import Attention, register_attention
from linpix.model.attention.recurrent import Memory, Recurrent
from linpix.model.experimental.features import register_feature_map

__all__ = ["Attention", "Memory", "Recurrent", "register_attention", "register_feature_map"]
