import pytest
import torch
from torch import Tensor

from model.ops import recurrent_step_reference

EPS = 1e-6


def step_inputs(rows: int, slots: int = 80) -> tuple[Tensor, ...]:
    """q, k, v, S, z and shuffled slots; S and z are views into a pool of three layers; D = 5 is not M = 4."""
    random = torch.Generator().manual_seed(rows)
    q, k = torch.rand(rows, 3, 5, generator=random), torch.rand(rows, 3, 5, generator=random)
    v = torch.randn(rows, 3, 4, generator=random)
    S = torch.randn(slots, 2, 3, 5, 4, generator=random)[:, 1]
    z = torch.rand(slots, 2, 3, 5, generator=random)[:, 1]
    return q, k, v, S, z, torch.randperm(slots - 1, generator=random)[:rows] + 1


def naive(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, slots: Tensor) -> Tensor:
    """Equations 18 to 20, row by row and head by head."""
    y = torch.empty_like(v)
    for row, slot in enumerate(slots.tolist()):
        for head in range(q.shape[1]):
            S[slot, head] += torch.outer(k[row, head], v[row, head])
            z[slot, head] += k[row, head]
            y[row, head] = q[row, head] @ S[slot, head] / (q[row, head] @ z[slot, head] + EPS)
    return y


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_reference_is_equations_18_to_20(rows):
    q, k, v, S, z, slots = step_inputs(rows)
    S_naive, z_naive = S.clone(), z.clone()
    y = recurrent_step_reference(q, k, v, S, z, slots, EPS)
    y_naive = naive(q, k, v, S_naive, z_naive, slots)
    torch.testing.assert_close((y, S, z), (y_naive, S_naive, z_naive))


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_step_agrees_with_the_reference(rows):
    """The operator may be a compiled library's; the state too, free slots included."""
    q, k, v, S, z, slots = step_inputs(rows)
    S_reference, z_reference = S.clone(), z.clone()
    y = torch.ops.linpix.recurrent_step(q, k, v, S, z, slots, EPS)
    y_reference = recurrent_step_reference(q, k, v, S_reference, z_reference, slots, EPS)
    torch.testing.assert_close((y, S, z), (y_reference, S_reference, z_reference))


def test_state_changes_in_place_at_slots_and_nowhere_else():
    q, k, v, S, z, slots = step_inputs(3)
    S_before, z_before, storage = S.clone(), z.clone(), S.data_ptr()
    torch.ops.linpix.recurrent_step(q, k, v, S, z, slots, EPS)
    others = [slot for slot in range(len(S)) if slot not in slots.tolist()]
    assert S.data_ptr() == storage
    assert torch.equal(S[others], S_before[others]) and torch.equal(z[others], z_before[others])
    assert not torch.equal(S[slots], S_before[slots]) and not torch.equal(z[slots], z_before[slots])


def test_several_padding_rows_share_slot_0_and_disturb_no_one():
    q, k, v, S, z, slots = step_inputs(6)
    S_alone, z_alone = S.clone(), z.clone()
    y_alone = torch.ops.linpix.recurrent_step(q[:3], k[:3], v[:3], S_alone, z_alone, slots[:3], EPS)
    slots[3:] = 0
    y = torch.ops.linpix.recurrent_step(q, k, v, S, z, slots, EPS)
    torch.testing.assert_close((y[:3], S[1:], z[1:]), (y_alone, S_alone[1:], z_alone[1:]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_schema_says_what_the_operator_does():
    q, k, v, S, z, slots = step_inputs(3)
    torch.library.opcheck(torch.ops.linpix.recurrent_step.default,
                          (q, k, v, S.contiguous(), z.contiguous(), slots, EPS))
