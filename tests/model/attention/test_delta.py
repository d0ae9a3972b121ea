import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linpix.model import ops
from linpix.model.ops import CHUNK, gated_delta_reference

LENGTHS = (0, 1, 31, 32, 33, 75, 500, 0)
SHORT = (0, 1, CHUNK, CHUNK + 3)
NEEDS_KERNELS = pytest.mark.skipif(not ops.compiled, reason=ops.why())
Form = Callable[..., tuple[Tensor, Tensor]]


def packed(lengths: tuple[int, ...] = SHORT, D: int = 5, M: int = 4, dtype: torch.dtype = torch.float64,
           seed: int = 0) -> list[Tensor]:
    """q, k, v, beta, g and offsets of sequences with two heads; q and k have norm 1, D is not M."""
    random, N = torch.Generator().manual_seed(seed), sum(lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(N, 2, *size, generator=random, dtype=torch.float64)

    q, k, v = F.normalize(normal(D), dim=-1), F.normalize(normal(D), dim=-1), normal(M)
    beta, g = normal().sigmoid(), -F.softplus(normal() - 2)
    small = torch.promote_types(dtype, torch.float32)
    return [q.to(dtype), k.to(dtype), v.to(dtype), beta.to(small), g.to(small),
            torch.tensor([0, *lengths]).cumsum(0)]


def operator(*given: Tensor) -> tuple[Tensor, Tensor]:
    """As training gets it: a compiled library's operator, or else the reference with the reference's gradient."""
    return torch.ops.linpix.gated_delta(*given)


def definition(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, offsets: Tensor) -> Tensor:
    """Sequence by sequence, token by token and head by head."""
    o = []
    for begin, end in pairwise(offsets.tolist()):
        S = [torch.zeros(q.shape[2], v.shape[2], dtype=q.dtype) for _ in range(q.shape[1])]
        for t in range(begin, end):
            for h in range(q.shape[1]):
                S[h] = g[t, h].exp() * S[h]
                S[h] = S[h] + torch.outer(k[t, h], beta[t, h] * (v[t, h] - k[t, h] @ S[h]))
                o.append(q[t, h] @ S[h])
    return torch.stack(o).reshape(v.shape)


def result_and_gradients(form: Form, given: list[Tensor]) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given[:5]]
    o = form(*leaves, given[5])[0]
    weight = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    return {"o": o.detach()} | dict(zip(("dq", "dk", "dv", "dbeta", "dg"),
                                        torch.autograd.grad((o * weight).sum(), leaves), strict=True))


def widened(given: list[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [x.to(dtype) for x in given[:5]] + given[5:]


def exact(given: list[Tensor]) -> dict[str, Tensor]:
    return result_and_gradients(gated_delta_reference, widened(given))


def assert_within(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Each number next to the largest of its tensor: it is a sum over tokens, each rounded."""
    for name, theirs in expected.items():
        assert found[name].isfinite().all(), name
        error = float((found[name].double() - theirs).abs().max())
        assert error <= relative * max(1.0, float(theirs.abs().max())), f"{name}: {error}"


def test_the_reference_is_the_recurrence():
    given = packed()
    torch.testing.assert_close(gated_delta_reference(*given)[0], definition(*given), rtol=1e-12, atol=1e-12)


def test_the_operator_keeps_the_states_that_the_reference_keeps():
    given = packed((3, 0, 61, 64, 33, 7))
    torch.testing.assert_close(operator(*given), gated_delta_reference(*given), rtol=1e-12, atol=1e-12)


def test_its_gradient_equals_finite_differences():
    *given, offsets = packed((0, 1, CHUNK + 3), D=3, M=2)
    assert torch.autograd.gradcheck(lambda *leaves: operator(*leaves, offsets)[0],
                                    [x.requires_grad_() for x in given])


def test_the_reference_of_its_gradient_is_what_torch_finds():
    *given, offsets = packed()
    do = torch.randn(given[2].shape, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in given]
    o, states = gated_delta_reference(*leaves, offsets)
    torch.testing.assert_close(ops.gated_delta_backward_reference(do, *given, offsets, states),
                               torch.autograd.grad((o * do).sum(), leaves), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("D", "M"), [(8, 8), (32, 32), (33, 64), (64, 32), (32, 33)])
def test_result_and_gradients_are_those_of_the_recurrence(D, M):
    given = packed(LENGTHS, D, M, torch.float32)
    expected = exact(given)
    assert_within(result_and_gradients(operator, given), expected, 1e-5)
    assert_within(result_and_gradients(operator, widened(given)), expected, 1e-12)


def never(g: Tensor) -> Tensor:
    return torch.zeros_like(g)


def at_once(g: Tensor) -> Tensor:
    return torch.full_like(g, -40)


def quickly(g: Tensor) -> Tensor:
    return torch.full_like(g, -3)


def half_of_it(g: Tensor) -> Tensor:
    return torch.where(torch.arange(len(g))[:, None] % 2 == 0, 0, 20 * g)


@pytest.mark.parametrize("forget", [never, at_once, quickly, half_of_it], ids=lambda forget: forget.__name__)
def test_a_state_may_fade_as_it_will(forget):
    given = packed((40, 100), 32, 32, torch.float32)
    given[4] = forget(given[4])
    assert_within(result_and_gradients(operator, given), exact(given), 1e-5)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_token_may_write_nothing_or_all(beta):
    given = packed((40, 100), 32, 32, torch.float32)
    given[3] = torch.full_like(given[3], beta)
    assert_within(result_and_gradients(operator, given), exact(given), 1e-5)


def test_one_key_may_be_written_again_and_again():
    given = packed((40, 100), 32, 32, torch.float32)
    given[1] = given[1][:1].expand_as(given[1]).contiguous()
    assert_within(result_and_gradients(operator, given), exact(given), 1e-5)
    given[3], given[4] = torch.ones_like(given[3]), torch.zeros_like(given[4])
    o = operator(given[1], *given[1:])[0]  # read with the same key
    torch.testing.assert_close(o, given[2], rtol=1e-4, atol=1e-4)  # the newest value, and nothing of those before


@NEEDS_KERNELS
def test_in_bfloat16_it_is_computed_in_float32_and_rounded_once():
    rounded = packed(LENGTHS, 32, 32, torch.bfloat16)
    wide = widened(rounded, torch.float32)
    (o, states), (o_wide, states_wide) = operator(*rounded), operator(*wide)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = torch.ops.linpix.gated_delta_backward(do, *rounded, states)
    expected = torch.ops.linpix.gated_delta_backward(do.float(), *wide, states_wide)
    assert torch.equal(o, o_wide.bfloat16()) and torch.equal(states, states_wide)
    assert all(torch.equal(ours, theirs.to(ours.dtype)) for ours, theirs in zip(found, expected, strict=True))
    assert [x.dtype for x in found] == [x.dtype for x in rounded[:5]]


@NEEDS_KERNELS
def test_a_sequence_does_not_depend_on_those_around_it():
    lengths = (33, 0, 70, 1, 64, 500)
    given = packed(lengths, 32, 33, torch.float32)
    together = result_and_gradients(operator, given)
    weight = torch.randn(given[2].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).float()
    for begin, end in pairwise(given[5].tolist()):
        leaves = [x[begin:end].clone().requires_grad_() for x in given[:5]]
        o = operator(*leaves, torch.tensor([0, end - begin]))[0]
        alone = (o.detach(), *torch.autograd.grad((o * weight[begin:end]).sum(), leaves))
        assert all(torch.equal(ours[begin:end], theirs)
                   for ours, theirs in zip(together.values(), alone, strict=True))


@NEEDS_KERNELS
def test_a_sequence_that_is_not_finite_spoils_no_other():
    given = packed((40, 40, 40), 5, 4, torch.float32)
    before = result_and_gradients(operator, given)
    given[2][45] = torch.nan
    after = result_and_gradients(operator, given)
    for name in before:
        assert torch.equal(before[name][:40], after[name][:40]) and torch.equal(before[name][80:], after[name][80:])
    assert after["o"][45:80].isnan().all()


@NEEDS_KERNELS
def test_it_does_not_depend_on_the_number_of_threads():
    given = packed(LENGTHS, 32, 32, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(result_and_gradients(operator, given))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][name], other[name]) for other in found for name in other)


@pytest.mark.parametrize("at", [0, 5, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_a_token_leaves_no_trace_in_earlier_results(at):
    given = packed((2 * CHUNK + 7,), dtype=torch.float32)
    before = operator(*given)[0]
    for x in given[:5]:
        x[at:] *= 0.5
    after = operator(*given)[0]
    assert torch.equal(before[:at], after[:at])
    assert not torch.equal(before[at:], after[at:])


def test_inputs_may_be_views_as_a_projection_leaves_them():
    q, k, v, beta, g, offsets = packed((40, 33), dtype=torch.float32)
    row = torch.cat([x.flatten(1) for x in (q, k, v, beta, g)], 1)
    parts = row.split([10, 10, 8, 2, 2], 1)
    views = [x.unflatten(1, (2, -1)) for x in parts[:3]] + [*parts[3:], offsets]
    found, expected = (result_and_gradients(operator, x) for x in (views, [q, k, v, beta, g, offsets]))
    torch.testing.assert_close(operator(*views), operator(*[x.contiguous() for x in views]), rtol=0, atol=0)
    assert_within(found, expected, 0.0)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_there_may_be_nothing_to_do(lengths):
    given = packed(lengths)
    assert all(x.numel() == 0 for x in result_and_gradients(operator, given).values())
    assert all(x.numel() == 0 for x in result_and_gradients(gated_delta_reference, given).values())


def test_it_is_differentiated_once_and_its_states_never():
    *given, offsets = packed((5, 40))
    q = given[0].requires_grad_()
    o, states = operator(q, *given[1:], offsets)
    assert not states.requires_grad
    gradient, = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_schema_says_what_the_operator_does(dtype):
    *given, offsets = packed((33, 1, 40), dtype=dtype)
    torch.library.opcheck(torch.ops.linpix.gated_delta.default, (*(x.requires_grad_() for x in given), offsets))


def test_what_is_kept_for_the_gradient_is_a_state_for_each_chunk():
    given = packed((100, 28, 77), 8, 6, torch.float32)
    assert operator(*given)[1].shape == (205 // CHUNK, 2, 8, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["portable", "avx2", "avx512"])
def test_every_version_of_the_kernel_that_this_processor_runs_is_right(kernel):
    """In a process of its own, since the choice is made once."""
    ended = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:cacheprovider", "-k",
                            "fade or bfloat16 or around or nothing_or_all"],
                           capture_output=True, text=True, env=os.environ | {"LINPIX_KERNEL": kernel})
    if "on this processor" not in ended.stdout + ended.stderr:  # else this machine cannot; another one's test run can
        assert ended.returncode == 0, ended.stdout[-3000:]


@NEEDS_KERNELS
@pytest.mark.parametrize(("name", "change", "message"), [
    ("q", lambda x: x[0], r"q must have shape \(N, H, D\), got \(2, 5\)"),
    ("q", lambda x: x.half(), "must be float32, bfloat16 or float64, got Half"),
    ("k", lambda x: x[:39], r"k must have shape \(68, 2, 5\), got \(39, 2, 5\)"),
    ("k", lambda x: x.float(), "k must have dtype Double, got Float"),
    ("v", lambda x: x[0], r"v must have shape \(N, H, M\), got \(2, 4\)"),
    ("v", lambda x: x.mT.contiguous().mT, "the last dimension of v must be contiguous"),
    ("beta", lambda x: x.float(), "beta must have dtype Double, got Float"),
    ("beta", lambda x: x[:, :1], r"beta must have shape \(68, 2\), got \(68, 1\)"),
    ("g", lambda x: x[:, None], r"g must have shape \(68, 2\), got \(68, 1, 2\)"),
    ("offsets", lambda x: x.int(), "offsets must have dtype Long, got Int"),
    ("offsets", lambda x: x[:0], r"offsets must have shape \(B \+ 1\), got \(0\)"),
    ("offsets", lambda x: x + 1, "offsets must go from 0 to 68, the number of tokens, got 1 to 69"),
    ("offsets", lambda x: x[:-1], "offsets must go from 0 to 68, the number of tokens, got 0 to 33"),
    ("offsets", lambda x: x[[0, 3, 1, 4]], "offsets must ascend, got 0 after 33"),
])
def test_what_cannot_be_is_an_error_that_says_what_it_saw(name, change, message):
    given = dict(zip(("q", "k", "v", "beta", "g", "offsets"), packed(), strict=True))
    with pytest.raises(RuntimeError, match=message):
        operator(*(given | {name: change(given[name])}).values())
