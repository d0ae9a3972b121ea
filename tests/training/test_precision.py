"""Muon takes torch's steps, and computes products in bfloat16 only where the processor has them."""

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
        self.seen |= {
            each.dtype
            for each in (result if isinstance(result, tuple) else (result,))
            if isinstance(each, torch.Tensor)
        }
        return result


def steps(
    optimizer: type[torch.optim.Muon],
) -> tuple[list[torch.Tensor], list[torch.Tensor], set[torch.dtype]]:
    """Matrices of several shapes after two steps, their last gradients, and the types that the
    steps computed in.
    """
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator)

    matrices = [
        torch.nn.Parameter(random(*shape)) for shape in ((24, 16), (16, 24), (24, 16), (8, 8))
    ]
    # without a gradient, as in a step that does not use it
    without = torch.nn.Parameter(random(24, 16))
    took = optimizer(
        [{"params": [*matrices, without], "weight_decay": 0.1}],
        lr=0.5,
        adjust_lr_fn="match_rms_adamw",
    )
    with Types() as types:
        for _ in range(2):
            for matrix in matrices:
                matrix.grad = random(*matrix.shape)
            took.step()
    return (
        [each.detach() for each in (*matrices, without)],
        [each.grad for each in matrices],
        types.seen,
    )


@pytest.mark.parametrize("has", [True, False], ids=["bfloat16", "float32"])
def test_muon_multiplies_in_bfloat16_only_where_that_is_fast(monkeypatch, has):
    monkeypatch.setattr(precision, "has_bf16_products", lambda device: has)
    expected, gradients, _ = steps(torch.optim.Muon)
    matrices, left, types = steps(Muon)
    assert (torch.bfloat16 in types) == has
    for one, other in zip(left, gradients, strict=True):
        assert torch.equal(one, other)
    for matrix, same in zip(matrices, expected, strict=True):
        torch.testing.assert_close(matrix, same, rtol=0, atol=0.0 if has else 0.02)
