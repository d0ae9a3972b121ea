"""The only interface to csrc: each operator's schema and its reference in torch.

The reference is definition, fallback and test oracle. A compiled library, if present, adds an
implementation of the same schema, and all callers of the operator get faster.
decode_quantum, prefill and read have no reference here: theirs are Transformer.step, prefill and
read. LINPIX_KERNEL=portable|avx2|avx512|avx512vnni|avx512bf16 chooses among the versions that a
processor can run; none hides the compiled kernels.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# these multiply bytes in hardware; the others emulate it
VNNI_KERNELS = ("avx512vnni", "avx512bf16")
GPU_HEADS = (8, 16, 32)  # sizes that the CUDA kernels support, with equal key and value dims
GPU_MAX_HEAD = 64  # largest key or value dim for attention over whole sequences
SEQUENCE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# increased with every change of a schema below or of the packed layout, so that a library for
# another is not loaded
SCHEMAS = 17

RECURRENT_STEP = (
    "recurrent_step(Tensor q, Tensor k, Tensor v, Tensor(a!) S, Tensor(b!) z, Tensor slots, float"
    " eps) -> Tensor"
)
# pools, rows, weights, sizes and limits hold many things in an order that csrc/order.h and
# model/packing.py name. The largest number of steps, or tokens, of a row is an argument, since
# reading it from a GPU would mean waiting. A row stops after so many passes, or when its steps are
# taken; a row that skips the layers has fewer passes than steps. patience: seconds per pass;
# threads that share columns and take longer on average go on without sharing. log_probs: whether
# log-probabilities are computed; else the first result has no columns.
DECODE_QUANTUM = (
    "decode_quantum(Tensor(a!)[] pools, Tensor rows, Tensor temperatures, Tensor[] weights,"
    " int[] sizes, float eps, int[] limits, float patience, bool log_probs)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
PREFILL = (
    "prefill(Tensor(a!)[] pools, Tensor rows, Tensor[] weights, int[] sizes, float eps, int most,"
    " int threads) -> ()"
)
# inputs (n, d_model): inputs of the first layer, one row of the batch after another; row i begins
# at offsets[i]. A GPU folds them into an empty state, whatever lies there, and trusts `most` to be
# the largest number of inputs of a row.
READ = (
    "read(Tensor(a!)[] pools, Tensor slots, Tensor inputs, Tensor offsets, Tensor[] weights,"
    " int[] sizes, float eps, int most, int threads) -> Tensor"
)
# Attention over whole sequences, packed one after the other, for training and prefill. The second
# result is the normaliser (N, H).
CAUSAL_ATTENTION = (
    "causal_attention(Tensor q, Tensor k, Tensor v, Tensor offsets, float eps) -> (Tensor, Tensor)"
)
CAUSAL_ATTENTION_BACKWARD = (
    "causal_attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor offsets,"
    " Tensor y, Tensor normaliser) -> (Tensor, Tensor, Tensor)"
)


# (..., D) -> (..., feature_dim)
FeatureMap = Callable[[Tensor], Tensor]


def phi(x: Tensor) -> Tensor:
    """The feature map elu(x) + 1 ("Transformers are RNNs", equation 7)."""
    return F.elu(x) + 1


def recurrent_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    slots: Tensor,
    eps: float,
    phi: FeatureMap = phi,
) -> Tensor:
    """Fold T tokens per row, one after the other, into its slot's state and read it out (equations
    18-20).

    q, k: (B, T, H, D) before the feature map · v: (B, T, H, M), all float32 or bfloat16 · S: (N, H,
          D, M) ·
    z: (N, H, D), both float32, changed in place at slots · slots: (B,) int64, no slot twice except
       0 ·
    returns (B, T, H, M), of v's dtype.
    """
    S_new, z_new, read = S[slots], z[slots], []
    q, k, values = phi(q.to(S.dtype)), phi(k.to(S.dtype)), v.to(S.dtype)
    for t in range(q.shape[1]):
        S_new = S_new + k[:, t, ..., None] * values[:, t, ..., None, :]
        z_new = z_new + k[:, t]
        numerator = (q[:, t, ..., None, :] @ S_new)[..., 0, :]
        read.append(numerator / ((q[:, t] * z_new).sum(-1, keepdim=True) + eps))
    S[slots] = S_new
    z[slots] = z_new
    return torch.stack(read, 1).to(v.dtype) if read else torch.empty_like(v)


def causal_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    eps: float,
    phi: FeatureMap = phi,
) -> tuple[Tensor, Tensor]:
    """Causal linear attention over whole sequences (equations 8-12): the result, (N, H, M), and its
    normaliser, (N, H).

    q, k: (N, H, D) before the feature map · v: (N, H, M), all of one dtype; the normaliser and all
    computation are float32, or float64 for float64 inputs · offsets: (B + 1,) int64, ascending from
    0 to N. Tokens offsets[b] .. offsets[b + 1] - 1 are sequence b. y_i = sum_{j<=i} (phi(q_i) .
    phi(k_j)) v_j over the normaliser
    sum_{j<=i} phi(q_i) . phi(k_j) + eps, chunk by chunk: tokens before a chunk enter through the
    state (S, z), tokens inside it through a masked C x C product. So memory is linear in the
    length.
    """
    inside, (q, k, v) = _side_by_side(offsets, q, k, v)
    y, normaliser = attention_of_one_length(q, k, v, eps, phi)
    return y[inside], normaliser[inside]


def attention_of_one_length(
    q: Tensor, k: Tensor, v: Tensor, eps: float, phi: FeatureMap = phi
) -> tuple[Tensor, Tensor]:
    """causal_attention_reference for B sequences of T tokens, without offsets, which torch.compile
    handles badly.

    q, k: (B, T, H, D) · v: (B, T, H, M) · returns (B, T, H, M) and (B, T, H).
    """
    length, dtype = q.shape[1], v.dtype
    # in bfloat16, sums over all tokens would stop growing
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
        Q, K, V = (_chunks(x) for x in (phi(q), phi(k), v))
        S = _of_chunks_before(K.mT @ V)  # (B, H, chunks, D, M)
        z = _of_chunks_before(K.sum(3, keepdim=True))  # (B, H, chunks, 1, D)
        scores = (Q @ K.mT).tril()
        normaliser = scores.sum(-1, keepdim=True) + (Q * z).sum(-1, keepdim=True) + eps
        y = _tokens((scores @ V + Q @ S) / normaliser, length)
    return y.to(dtype).contiguous(), _tokens(normaliser, length)[..., 0].contiguous()


def causal_attention_backward_reference(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, y: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v before the feature map, given g, the gradient of y (equations 13-15),
    chunk by chunk.

    A column of ones beside v makes the normaliser one more numerator.
    """
    dtype = q.dtype
    g, y, v = (x.to(normaliser.dtype) for x in (g, y, v))
    mapped_q, mapped_k = (phi(x.to(normaliser.dtype)) for x in (q, k))
    down = torch.cat([g, -(g * y).sum(-1, keepdim=True)], -1) / normaliser[..., None]
    ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    inside, padded = _side_by_side(offsets, mapped_q, mapped_k, down, ones)
    length = inside.shape[1]
    Q, K, G, V = (_chunks(x) for x in padded)
    before = _of_chunks_before(K.mT @ V)
    after = _of_chunks_before((Q.mT @ G).flip(2)).flip(2)
    scores, gradients = (Q @ K.mT).tril(), (G @ V.mT).tril()
    dq, dk = (
        _tokens(x, length)[inside]
        for x in (gradients @ K + G @ before.mT, gradients.mT @ Q + V @ after.mT)
    )
    dv = _tokens(scores.mT @ G + K @ after, length)[inside][..., :-1]
    # through the feature map: phi'(x) = 1 where x > 0, where phi(x) > 1; elsewhere phi'(x) = phi(x)
    dq, dk = dq * mapped_q.clamp(max=1), dk * mapped_k.clamp(max=1)
    return dq.to(dtype).contiguous(), dk.to(dtype).contiguous(), dv.to(dtype).contiguous()


CHUNK = 32  # tokens; quadratic inside a chunk, recurrent between chunks


def _side_by_side(offsets: Tensor, *packed: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Each (N, ...) as (B, T, ...), with zeros after the end of a sequence; and (B, T) bool, true
    at tokens.
    """
    lengths = offsets.diff()
    B, T = len(lengths), int(lengths.max()) if len(lengths) else 0
    if len(packed[0]) == B * T:  # of one length
        return torch.ones(B, T, dtype=torch.bool, device=offsets.device), [
            x.unflatten(0, (B, T)) for x in packed
        ]
    t = torch.arange(T, device=offsets.device)
    inside = t < lengths[:, None]
    tokens = torch.where(inside, offsets[:-1, None] + t, offsets[-1])  # the last is a row of zeros
    return inside, [F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))[tokens] for x in packed]


def _chunks(x: Tensor) -> Tensor:
    """(B, T, H, E) -> (B, H, chunks, C, E); padded with zeros, which add nothing and which _tokens
    cuts off.
    """
    return F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK)).unflatten(2, (-1, CHUNK))


def _tokens(x: Tensor, length: int) -> Tensor:
    """(B, H, chunks, C, E) -> (B, T, H, E)"""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


def _of_chunks_before(x: Tensor) -> Tensor:
    """The sum over all chunks before each one, by shifting: subtracting the own chunk would leave a
    rounding error.
    """
    return F.pad(x.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0))


# the shapes of results, from those arguments that say something about them


def _recurrent_step_shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


def _causal_attention_shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(v.shape), v.new_empty(v.shape[:2], dtype=dtype)


def _causal_attention_backward_shape(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_for_backward(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.mark_non_differentiable(output[1])  # the normaliser is only for the gradient of y


def _causal_attention_gradient(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if g.stride(-1) != 1:
        g = g.contiguous()
    return *torch.ops.linpix.causal_attention_backward(g, *ctx.saved_tensors), None, None


def _refuse_second_gradient(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(
        "causal_attention has no second derivative; use linpix.model.ops.causal_attention_reference"
        " for that"
    )


def _decode_quantum_shape(
    pools: list[Tensor], rows: Tensor, temperatures: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, limits, _, log_probs = others
    count = rows.shape[1]
    return (
        temperatures.new_empty(count, limits[0] * log_probs),
        rows.new_empty(count, dtype=torch.bool),
        rows.new_empty(count),
        rows.new_empty(count),
    )


def _prefill_shape(*_: Any) -> None:
    return None


def _read_shape(pools: list[Tensor], slots: Tensor, inputs: Tensor, *_: Any) -> Tensor:
    return inputs.new_empty(slots.shape[0], inputs.shape[1])


def _define() -> None:
    """Define the operators, with their references, the shapes of their results, and gradients."""
    library = torch.library.Library("linpix", "DEF")
    for schema in (
        RECURRENT_STEP,
        DECODE_QUANTUM,
        PREFILL,
        READ,
        CAUSAL_ATTENTION,
        CAUSAL_ATTENTION_BACKWARD,
        "cpu_kernel() -> str",
        "cpu_has_fast_bf16() -> bool",
    ):
        library.define(schema)
    for name, reference in (
        ("recurrent_step", recurrent_step_reference),
        ("causal_attention", causal_attention_reference),
        ("causal_attention_backward", causal_attention_backward_reference),
    ):
        library.impl(name, reference, "CompositeExplicitAutograd")
    for name, shape in (
        ("recurrent_step", _recurrent_step_shape),
        ("causal_attention", _causal_attention_shape),
        ("causal_attention_backward", _causal_attention_backward_shape),
        ("decode_quantum", _decode_quantum_shape),
        ("prefill", _prefill_shape),
        ("read", _read_shape),
    ):
        torch.library.register_fake(f"linpix::{name}", shape)
    torch.library.register_autograd("linpix::causal_attention_backward", _refuse_second_gradient)
    torch.library.register_autograd(
        "linpix::causal_attention", _causal_attention_gradient, setup_context=_keep_for_backward
    )
    # torch outlives this module, and the operators live as long as their library
    torch.ops.linpix.defined = SCHEMAS, library  # type: ignore[attr-defined]


def _define_once() -> None:
    """Define the operators, unless this module was imported before, as in a notebook that imports
    packages again. Modules of both imports then use the same operators.
    """
    schemas, _ = getattr(torch.ops.linpix, "defined", (None, None))
    if schemas is None:
        _define()
    elif schemas != SCHEMAS:
        raise ImportError(
            f"this process has the operators of another LinPix (version {schemas} of their schemas,"
            f" not {SCHEMAS}); start Python again"
        )


def find_library(kind: str) -> Path | None:
    """The library of csrc for "cpu" or "cuda", or None if it was not compiled. LINPIX_KERNEL=none
    hides it.
    """
    path = Path(__file__).with_name(f"liblinpix_{kind}_{SCHEMAS}.so")
    return path if path.exists() and os.environ.get("LINPIX_KERNEL") != "none" else None


def _load(kind: str) -> bool:
    """Load the compiled library; return whether there is one. A broken library raises OSError: no
    silent fallback.
    """
    if (path := find_library(kind)) is None:
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise OSError(
            f"the compiled kernels cannot be loaded ({error}); install LinPix again, or decode"
            " slowly with LINPIX_KERNEL=none"
        ) from error
    return True


def _check_choice() -> None:
    try:
        torch.ops.linpix.cpu_kernel()
    except RuntimeError as error:  # its text begins with a source location
        raise ValueError(
            str(error).splitlines()[0].partition(", ")[2].partition(", ")[2]
        ) from error


_define_once()
compiled = _load("cpu")
if compiled:
    _check_choice()
_GPU_LEAST = (8, 0)  # compute capability: bfloat16 matrix products, asynchronous copies
# whether there are CUDA kernels and a GPU that can run them: the first that the process sees, as is
# "cuda" everywhere
gpu = (
    _load("cuda") and torch.cuda.is_available() and torch.cuda.get_device_capability() >= _GPU_LEAST
)


def gpu_shared_bytes() -> int:
    """Bytes of shared memory that a thread block may ask for on this GPU."""
    least = 99 << 10  # the least of all supported GPUs, that of compute capability 8.6 and 8.9
    return int(getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", least))


def kernel() -> str:
    """The instruction set that the compiled kernels use here, or "none"."""
    return str(torch.ops.linpix.cpu_kernel()) if compiled else "none"


def why() -> str:
    """Why `kernel()` is in use or, if none is, why and what to do about it, in a sentence."""
    asked = os.environ.get("LINPIX_KERNEL")
    if compiled:
        if asked:
            return "LINPIX_KERNEL asks for it"
        return f"the best compiled variant that this {platform.machine()} CPU can run"
    if asked == "none":
        return "LINPIX_KERNEL=none hides the compiled kernels"
    return (
        "csrc was not compiled when LinPix was installed; install torch 2.10 or later and a C++20"
        " compiler such as g++, then install LinPix again"
    )


def why_no_gpu() -> str:
    """Why decoding cannot run on a GPU here and what to do about it, in a sentence; "" if it
    can.
    """
    if gpu:
        return ""
    if torch.version.cuda is None:
        return "this torch was built without CUDA; install a CUDA build, then install LinPix again"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU on this machine"
    if (capability := torch.cuda.get_device_capability()) < _GPU_LEAST:
        return (
            f"{torch.cuda.get_device_name()} has compute capability"
            f" {'.'.join(map(str, capability))}, and the kernels need at least"
            f" {'.'.join(map(str, _GPU_LEAST))}"
        )
    if os.environ.get("LINPIX_KERNEL") == "none":
        return "LINPIX_KERNEL=none hides the compiled kernels"
    return (
        "csrc/cuda was not compiled when LinPix was installed; install the CUDA"
        f" {torch.version.cuda} toolkit, which has nvcc, then install LinPix again"
    )
