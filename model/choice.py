"""Which engine decodes a model on this machine, in which precision, on which device; and why not
another.
"""

from dataclasses import dataclass

import torch

from . import ops
from .config import ModelConfig
from .packing import GPU_TILE, PRECISIONS, TILE

GPU_MIXTURES = 512
# a row of d_model is in registers; one of d_ff or values is in shared memory
GPU_D_MODEL, GPU_DEPTH = 512, 2048
# per block in fp32: bytes, rows, floats of padding per row
_FP32_WEIGHTS, _FP32_ROWS, _FP32_PAD = 32 << 10, 16, 4


@dataclass(frozen=True, slots=True)
class Choice:
    engine: str  # eager or compiled
    precision: str  # one of PRECISIONS
    warning: str = ""  # why decoding is slower than it could be, and the remedy
    device: str = "cpu"  # cpu or cuda


def choose(
    config: ModelConfig, engine: str = "auto", precision: str = "auto", device: str = "cpu"
) -> Choice:
    """Resolve engine auto, eager or compiled; precision auto or one of PRECISIONS; device auto, cpu
    or cuda.

    auto chooses a GPU and the compiled engine if they can run the model, and bf16 if the processor
    has it. It never chooses int8, which costs likelihood. Raises ValueError with the remedy.
    """
    _check("engine", engine, ("auto", "eager", "compiled"))
    _check("precision", precision, ("auto", *PRECISIONS))
    _check("device", device, ("auto", "cpu", "cuda"))
    if device != "cpu":
        obstacle = gpu_obstacle(config, precision)
        if not obstacle and engine == "eager":
            obstacle = "the eager engine runs only on a CPU"
        if not obstacle:
            fastest = "bf16" if precision == "auto" else precision
            return Choice("compiled", fastest, device="cuda")
        if device == "cuda":
            raise ValueError(
                f"--device cuda cannot run this model: {obstacle}; or use --device cpu"
            )
    return _on_processor(config, engine, precision)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}")


def _on_processor(config: ModelConfig, engine: str, precision: str) -> Choice:
    obstacle = processor_obstacle(config)
    if obstacle and engine == "compiled":
        raise ValueError(
            f"the compiled engine cannot run this model: {obstacle}; or use --engine eager"
        )
    if not obstacle and engine != "eager":
        if precision == "auto":
            precision = "bf16" if torch.ops.linpix.cpu_has_fast_bf16() else "fp32"
        return Choice("compiled", precision)
    if precision not in ("auto", "fp32"):
        remedy = ", or --engine compiled"
        if obstacle:
            remedy = f"; the compiled engine cannot run this model: {obstacle}"
        raise ValueError(f"the eager engine computes in fp32, so use --precision fp32{remedy}")
    warning = ""
    if engine == "auto" and (not ops.compiled or config.attention == "linear"):
        warning = f"decoding slowly in the eager engine: {obstacle}"
    return Choice("eager", "fp32", warning)


def processor_obstacle(config: ModelConfig) -> str:
    """Why the compiled engine cannot decode this model on a processor; "" if it can."""
    if not ops.compiled:
        return ops.why()
    if unsupported := _unsupported(config):
        return unsupported
    if config.background is not None and config.background_dim % TILE:
        return (
            f"it needs a background_dim that is a multiple of {TILE}, but this model's is "
            f"{config.background_dim}"
        )
    if config.d_model % TILE:
        return (
            f"it needs a d_model that is a multiple of {TILE}, but this model's is {config.d_model}"
        )
    return ""


def gpu_obstacle(config: ModelConfig, precision: str = "auto") -> str:
    """Why a GPU cannot decode this model here in a precision, auto or one of PRECISIONS; "" if it
    can.
    """
    if not ops.gpu:
        return ops.why_no_gpu()
    if precision == "int8":
        return "its kernels multiply in fp32 or bf16, not in int8; use --precision bf16"
    if unsupported := _unsupported(config):
        return unsupported
    if config.key_dim != config.value_dim or config.key_dim not in ops.GPU_HEADS:
        return (
            f"it has kernels for heads of {', '.join(map(str, ops.GPU_HEADS))}, for keys and values"
            f" alike, but this model has {config.key_dim} and {config.value_dim}"
        )
    if config.d_model % 8 or config.d_model > GPU_D_MODEL:
        return (
            f"it needs a d_model that is a multiple of 8 and at most {GPU_D_MODEL}, but this"
            f" model's is {config.d_model}"
        )
    depth = max(config.d_ff, config.heads * config.value_dim)
    if depth > GPU_DEPTH:
        return (
            f"it needs d_ff and heads x value_dim of at most {GPU_DEPTH}, but this model has"
            f" {depth}"
        )
    if precision == "fp32":
        most = _fp32_depth(ops.gpu_shared_bytes())
        if depth > most:
            return (
                f"in fp32 it needs d_ff and heads x value_dim of at most {most} on this GPU, but"
                f" this model has {depth}; use --precision bf16"
            )
    if config.mixtures > GPU_MIXTURES:
        return f"it supports at most {GPU_MIXTURES} mixtures, but this model has {config.mixtures}"
    return ""


def _unsupported(config: ModelConfig) -> str:
    """What of the model has kernels neither for a processor nor for a GPU; "" if all has."""
    if config.attention != "linear":
        return f"it supports only linear attention, but this model has {config.attention}"
    if config.feature_map != "elu+1":
        return (
            f"it has kernels only for the feature map elu+1, but this model has"
            f" {config.feature_map}"
        )
    if config.residual != "plain":
        return f"it supports only plain residuals, but this model has {config.residual}"
    return ""


def _fp32_depth(shared_bytes: int) -> int:
    """The largest d_ff whose rows fit in a block's shared memory in fp32, beside the weights being
    copied.
    """
    return ((shared_bytes - _FP32_WEIGHTS) // (4 * _FP32_ROWS) - _FP32_PAD) // GPU_TILE * GPU_TILE
