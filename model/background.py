"""The head for sub-pixels amid background, which are predicted without the layers.

If everything that a sub-pixel looks up is background, the sub-pixel itself almost always is, too.
Two thirds of MNIST's sub-pixels are like that, and they hold 4 % of the bits. Such a sub-pixel
leaves no trace in the recurrent state. One hidden layer predicts it from its position, the class,
how much known background follows, and the final features of the last token that went through the
layers; these features summarise what has been drawn so far.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import categorical
from .config import ModelConfig
from .inputs import START

LOGIT_OF_GROUND = 5.5  # at first: a sub-pixel amid background is background in 996 of 1,000 cases


class BackgroundHead(nn.Module):
    """The distributions of sub-pixels that skip the layers: parameters as the head of the layers
    gives them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.background is not None
        self.config, self.subpixels, self.class_rows = config, config.subpixels, config.classes + 1
        self.project = nn.Linear(config.d_model, config.background_dim, bias=False)
        # rows: position, class (none, 0, 1, ...), known background that follows (0, 1, ...)
        self.table = nn.Parameter(
            torch.empty(
                self.subpixels + self.class_rows + len(config.following) + 1, config.background_dim
            )
        )
        nn.init.normal_(self.table, std=0.1)
        if config.head == "categorical":
            self.head = categorical.linear(
                config.background_dim, config.ground, LOGIT_OF_GROUND, config.values
            )
            return
        self.head = nn.Linear(config.background_dim, 3 * config.mixtures)
        # initially: almost surely background
        logit_probs, means, log_scales = self.head.bias.detach().chunk(3)
        logit_probs[0], means[0], log_scales[:] = 3.0, config.background / 127.5 - 1, -1.0
        log_scales[0] = -5.0

    def forward(self, last: Tensor, t: Tensor, start: Tensor, following: Tensor) -> Tensor:
        """Parameters, (n, P).

        last: (n, background_dim), `project` of the last token's final features, 0 if there is no
              token · t, start: (n,)
        following: (n,) int64, how many following neighbours are known background.
        """
        rows = torch.stack(
            [t, self.subpixels + start - START, self.subpixels + self.class_rows + following], 1
        )
        parameters = self.head(F.gelu(last + F.embedding_bag(rows, self.table, mode="sum")))
        return (
            categorical.from_two_stages(parameters, self.config.ground)
            if self.config.head == "categorical"
            else parameters
        )
