import pytest
import torch
from torch import Tensor

from linpix.model import ops
from linpix.model.ops import phi, recurrent_step_reference
from tools.harness.commands import python

EPS = 1e-6


def step_inputs(
    rows: int,
    slots: int = 80,
    *,
    tokens: int = 1,
    D: int = 5,
    M: int = 4,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """q, k, v, S, z and shuffled slots; S and z are views into a pool of two layers; D is not M."""
    random = torch.Generator().manual_seed(rows)
    q, k = (torch.randn(rows, tokens, 3, D, generator=random).to(dtype) for _ in range(2))
    v = torch.randn(rows, tokens, 3, M, generator=random).to(dtype)
    S = torch.randn(slots, 2, 3, D, M, generator=random)[:, 1]
    z = torch.rand(slots, 2, 3, D, generator=random)[:, 1] + 1
    return q, k, v, S, z, torch.randperm(slots - 1, generator=random)[:rows] + 1


def naive(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor, slots: Tensor) -> Tensor:
    """Equations 18 to 20, row by row, token by token and head by head."""
    y = torch.empty_like(v)
    for row, slot in enumerate(slots.tolist()):
        for t in range(q.shape[1]):
            for head in range(q.shape[2]):
                mapped_q, mapped_k = phi(q[row, t, head]), phi(k[row, t, head])
                S[slot, head] += torch.outer(mapped_k, v[row, t, head])
                z[slot, head] += mapped_k
                y[row, t, head] = mapped_q @ S[slot, head] / (mapped_q @ z[slot, head] + EPS)
    return y


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_reference_is_equations_18_to_20(rows, tokens):
    q, k, v, S, z, slots = step_inputs(rows, tokens=tokens)
    S_naive, z_naive = S.clone(), z.clone()
    y = recurrent_step_reference(q, k, v, S, z, slots, EPS)
    y_naive = naive(q, k, v, S_naive, z_naive, slots)
    torch.testing.assert_close((y, S, z), (y_naive, S_naive, z_naive))


@pytest.mark.parametrize(("D", "M"), [(5, 4), (8, 8), (32, 32), (16, 48), (33, 65)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_step_agrees_with_the_reference(rows, tokens, D, M):
    """The operator may be a compiled library's; the state too, free slots included."""
    q, k, v, S, z, slots = step_inputs(rows, tokens=tokens, D=D, M=M)
    S_reference, z_reference = S.clone(), z.clone()
    y = torch.ops.linpix.recurrent_step(q, k, v, S, z, slots, EPS)
    y_reference = recurrent_step_reference(q, k, v, S_reference, z_reference, slots, EPS)
    torch.testing.assert_close((y, S, z), (y_reference, S_reference, z_reference))


def assert_near_float64(operator, steps: int, at_once: int, device: str = "cpu") -> None:
    """S and z after a whole image: relative Frobenius norm of their errors, at most 1e-5."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, steps, 2, 32, generator=random) for _ in range(3))
    S, z = torch.zeros(2, 2, 32, 32, device=device), torch.zeros(2, 2, 32, device=device)
    for begin in range(0, steps, at_once):
        parts = [x[:, begin : begin + at_once].to(device) for x in (q, k, v)]
        operator(*parts, S, z, torch.tensor([1], device=device), EPS)
    mapped, values = phi(k[0].double()), v[0].double()
    exact = torch.einsum("thd,thm->hdm", mapped, values), mapped.sum(0)
    for found, expected in zip((S[1], z[1]), exact, strict=True):
        assert float((found.cpu() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("steps", [784, 3072])
def test_the_state_stays_close_to_float64_over_a_whole_image(steps):
    assert_near_float64(torch.ops.linpix.recurrent_step, steps, at_once=1)


def test_several_padding_rows_share_slot_0_and_disturb_no_one():
    q, k, v, S, z, slots = step_inputs(6)
    S_alone, z_alone = S.clone(), z.clone()
    y_alone = torch.ops.linpix.recurrent_step(q[:3], k[:3], v[:3], S_alone, z_alone, slots[:3], EPS)
    slots[3:] = 0
    y = torch.ops.linpix.recurrent_step(q, k, v, S, z, slots, EPS)
    torch.testing.assert_close((y[:3], S[1:], z[1:]), (y_alone, S_alone[1:], z_alone[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_schema_says_what_the_operator_does(dtype):
    q, k, v, S, z, slots = step_inputs(3, tokens=2, dtype=dtype)
    torch.library.opcheck(
        torch.ops.linpix.recurrent_step.default,
        (q, k, v, S.contiguous(), z.contiguous(), slots, EPS),
    )


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("slots", lambda x: x + 80, r"slots must be in 0\.\.79, got"),
        ("slots", lambda x: x - 99, r"slots must be in 0\.\.79, got -"),
        ("slots", lambda x: x * 0 + 7, "slot 7 appears twice"),
        ("slots", lambda x: x[:2], r"slots must have shape \(3\), got \(2\)"),
        ("slots", lambda x: x.int(), "slots must have dtype Long"),
        ("q", lambda x: x[:, 0], r"q must have shape \(B, T, H"),
        ("q", lambda x: x.double(), "must be float32 or bfloat16, got Double"),
        ("k", lambda x: x[..., :3], "k must have shape"),
        ("k", lambda x: x.bfloat16(), "k must have dtype Float"),
        ("v", lambda x: x[0], r"v must have shape \(B, T, H, M\)"),
        ("S", lambda x: x.bfloat16(), "S must have dtype Float"),
        ("S", lambda x: x.mT.contiguous().mT, "each slot of S and z must be contiguous"),
        ("z", lambda x: x[:79], r"z must have shape \(80, 3, 5\), got \(79, 3, 5\)"),
    ],
    ids=lambda x: x if isinstance(x, str) and x.isidentifier() else "",
)
def test_invalid_arguments_are_an_error_that_says_what_was_given(name, change, message):
    given = dict(zip(("q", "k", "v", "S", "z", "slots"), step_inputs(3), strict=True))
    with pytest.raises(RuntimeError, match=message):
        torch.ops.linpix.recurrent_step(*(given | {name: change(given[name])}).values(), EPS)


@pytest.mark.parametrize("kernel", [ops.kernel(), "none"])
def test_it_can_be_imported_again_and_reloaded(kernel):
    """As notebooks and servers of scripts do. What the first import made is used afterwards."""
    code = """if True:
        import gc, importlib, sys, torch
        from linpix.model import ops
        print(ops.kernel(), ops.why())
        one, S, z = torch.ones(1, 1, 1, 2), torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2)
        torch.ops.linpix.recurrent_step(one, one, one, S, z, torch.tensor([1]), 1e-6)
        q = torch.ones(3, 1, 8, requires_grad=True)
        def gradient():
            y, _ = torch.ops.linpix.causal_attention(q, q, q, torch.tensor([0, 3]), 1e-6)
            return torch.autograd.grad(y.sum(), q)[0].tolist()
        first = gradient()
        for again in range(2):
            for name in [name for name in sys.modules if name.startswith("linpix")]:
                del sys.modules[name]
            del ops
            gc.collect()
            from linpix.model import ops
            assert gradient() == first
        importlib.reload(ops)
        assert gradient() == first
        ops.torch.ops.linpix.defined = -1, None
        importlib.reload(ops)
    """
    done = python(code, LINPIX_KERNEL=kernel)
    assert done.stdout.startswith(kernel)
    assert kernel != "none" or "hides the compiled kernels" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "ImportError: this process has the operators of another LinPix (version -1 of their"
        f" schemas, not {ops.SCHEMAS}); start Python again"
    )
