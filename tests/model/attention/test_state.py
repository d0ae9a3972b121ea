import dataclasses

import pytest
import torch
from torch import Tensor

from linpix.model import plugins
from linpix.model.attention import PADDING_SLOT, attention_for
from linpix.model.attention.linear import RecurrentState
from linpix.model.attention.recurrent import RecurrentPool
from linpix.model.attention.softmax import KeyValueState
from linpix.model.config import PRESETS, ModelConfig
from linpix.model.inputs import START
from linpix.model.transformer import Transformer
from tests.nets import net_of, noise
from tools.harness.commands import ROOT

ATTENTIONS = ["linear", "softmax", "gated"]
SLOTS = 6


@pytest.fixture(autouse=True)
def gated(no_plugins):
    plugins.load(str(ROOT / "examples/gated.py"))


def config_of(attention: str) -> ModelConfig:
    return dataclasses.replace(PRESETS["tiny"], attention=attention, value_dim=5)


def memory(state: RecurrentState | KeyValueState | RecurrentPool) -> list[Tensor]:
    """The tensors of a pool, slots first."""
    if isinstance(state, RecurrentPool):
        return [*state.memory.values()]
    return [state.S, state.z] if isinstance(state, RecurrentState) else [state.keys, state.values]


def decode(
    net: Transformer, canvas: Tensor, state, slots: Tensor, begin: int = 0, end: int = 64
) -> Tensor:
    """The parameters at begin .. end - 1, step by step: (B, end - begin, 3 * K)."""
    start = torch.full((len(canvas),), START)
    return torch.stack(
        [
            net.step(canvas, torch.full((len(canvas),), t), start, state, slots)
            for t in range(begin, end)
        ],
        1,
    )


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_slot_is_as_large_as_its_attention_says(kind):
    attention = attention_for(config_of(kind))
    size = sum(x.nbytes for x in memory(attention.new_state(SLOTS)))
    assert size == attention.state_bytes * (SLOTS + 1)  # and one for padding


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_taken_slot_starts_empty_whatever_it_held(attention):
    net, slots = net_of(config_of(attention)), torch.tensor([4])
    fresh = decode(net, noise(1), attention_for(net.config).new_state(SLOTS), slots)
    state = attention_for(net.config).new_state(SLOTS)
    decode(net, noise(1).flip(1), state, slots)
    used = decode(net, noise(1), state, slots)
    # keys and values are overwritten anyhow
    assert attention == "softmax" or not torch.equal(used, fresh)
    state.fill_with_nan(4)
    state.clear(4)
    assert torch.equal(decode(net, noise(1), state, slots), fresh)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_poison_in_the_padding_slot_stays_with_padding_rows(attention):
    net, canvas = net_of(config_of(attention)), noise(3)
    clean = decode(
        net, canvas, attention_for(net.config).new_state(SLOTS), torch.tensor([5, PADDING_SLOT, 2])
    )
    state = attention_for(net.config).new_state(SLOTS)
    state.fill_with_nan(PADDING_SLOT)
    # softmax overwrites the tokens of padding rows as it goes, so only linear rows must show the
    # poison
    poisoned = decode(net, canvas, state, torch.tensor([5, PADDING_SLOT, 2]))
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert attention == "softmax" or bool(poisoned[1].isnan().all())


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_step_and_prefill_leave_other_slots_untouched_bitwise(attention):
    net, slots = net_of(config_of(attention)), torch.tensor([5, 2])
    state = attention_for(net.config).new_state(SLOTS)
    for x in memory(state):
        x.normal_(generator=torch.Generator().manual_seed(0))
    for slot in slots.tolist():
        state.clear(slot)
    before = [x.clone() for x in memory(state)]
    net.prefill(noise(2), 20, torch.full((2,), START), state, slots)
    decode(net, noise(2), state, slots, 20, 40)
    others = sorted(set(range(SLOTS + 1)) - set(slots.tolist()))
    for now, then in zip(memory(state), before, strict=True):
        assert torch.equal(now[others], then[others])
        assert not any(torch.equal(now[slot], then[slot]) for slot in slots.tolist())


@pytest.mark.parametrize("positions", [[20, 20, 20], [20, 9, 3], [1, 2, 3]])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_step_in_place_is_that_of_slots_apart(attention, positions):
    net, canvas = net_of(config_of(attention)), noise(3)
    parameters = []
    for slots in (torch.tensor([2, 3, 4]), torch.tensor([6, 1, 4])):
        state = (
            RecurrentState(net.config, SLOTS, operator=False)
            if attention == "linear"
            else net.attention.new_state(SLOTS)
        )
        for row, t in enumerate(positions):
            decode(net, canvas[row : row + 1], state, slots[row : row + 1], 0, t)
        stepped = net.step(canvas, torch.tensor(positions), torch.full((3,), START), state, slots)
        parameters.append((stepped, *(x[slots] for x in memory(state))))
    torch.testing.assert_close(*parameters)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_copies_of_a_slot_go_on_like_the_original_and_apart(attention):
    net, canvas = net_of(config_of(attention)), noise(1).expand(3, -1).clone()
    state = attention_for(net.config).new_state(SLOTS)
    net.prefill(canvas[:1], 20, torch.full((1,), START), state, torch.tensor([3]))
    state.fill_with_nan(1)
    state.copy(3, [1, 6])
    for x in memory(state):
        assert torch.equal(x[1], x[3]) and torch.equal(x[6], x[3])
        assert not bool(x[2].any())
    canvas[2, 30] ^= 128
    parameters = decode(net, canvas, state, torch.tensor([3, 1, 6]), 20, 64)
    torch.testing.assert_close(parameters[1], parameters[0])
    torch.testing.assert_close(parameters[2, :11], parameters[0, :11])
    assert float((parameters[2, 11:] - parameters[0, 11:]).abs().amax(1).min()) > 1e-4


@pytest.mark.parametrize("attention", ["linear", "gated"])
def test_a_kept_slot_is_restored_bitwise(attention):
    net, slots = net_of(config_of(attention)), torch.tensor([3, 5])
    state = attention_for(net.config).new_state(SLOTS)
    decode(net, noise(2), state, slots, 0, 9)
    state.keep(slots)
    before = decode(net, noise(2), state, slots, 9, 12)
    state.fill_with_nan(5)
    state.restore(slots)
    assert torch.equal(decode(net, noise(2), state, slots, 9, 12), before)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_prefill_and_steps_agree_with_the_parallel_form(attention):
    net, canvas = net_of(config_of(attention), spread=0.1), noise(2)
    state, slots = attention_for(net.config).new_state(SLOTS), torch.tensor([4, 1])
    net.prefill(canvas, 40, torch.full((2,), START), state, slots)
    stepped = decode(net, canvas, state, slots, 40, 64)
    torch.testing.assert_close(stepped, net(canvas)[:, 40:], atol=1e-5, rtol=1e-5)
