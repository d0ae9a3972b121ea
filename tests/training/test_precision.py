"""Products in bfloat16 are computed only where the processor has them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linpix.training import precision
from linpix.training.precision import Muon


class Types(TorchDispatchMode):
    """Collects the types of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {each.dtype for each in (result if isinstance(result, tuple) else (result,))
                      if isinstance(each, torch.Tensor)}
        return result


def step(optimizer: type[torch.optim.Muon]) -> tuple[torch.Tensor, torch.Tensor, set[torch.dtype]]:
    """A matrix after one step, its gradient, and the types that the step computed in."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.nn.Parameter(torch.randn(24, 16, generator=generator))
    matrix.grad = torch.randn(24, 16, generator=generator)
    with Types() as types:
        optimizer([{"params": [matrix], "weight_decay": 0.0}], lr=1.0, adjust_lr_fn="match_rms_adamw").step()
    return matrix.detach(), matrix.grad, types.seen


@pytest.mark.parametrize("has", [True, False], ids=["bfloat16", "float32"])
def test_muon_multiplies_in_bfloat16_only_where_that_is_fast(monkeypatch, has):
    monkeypatch.setattr(precision, "has_bf16_products", lambda device: has)
    expected, gradient, _ = step(torch.optim.Muon)
    matrix, left, types = step(Muon)
    assert (torch.bfloat16 in types) == has
    assert torch.equal(left, gradient)
    assert torch.equal(matrix, expected) == has
    torch.testing.assert_close(matrix, expected, rtol=0, atol=0.02)
