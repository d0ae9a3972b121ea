"""Models for the compiled engine: which models it can run, and their weights in the layout that
csrc reads.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from . import categorical
from .conditional import Conditional
from .config import ModelConfig
from .heads import parameters_per_token
from .team import Team
from .transformer import Layer, Transformer

TILE = 16  # columns per block: one AVX-512 register of float32
GPU_TILE = 32  # on a GPU, columns and depth are padded to multiples of this
PANEL = 4  # most blocks per panel
_BEFORE_LAYERS, _EACH_LAYER = 13, 12  # tensors of Packed.weights
# The order in which csrc's operators get things: csrc/order.h has the same names.
# Tensors by slot: canvas (N, T) uint8, known (N, T) bool, the same for all sub-pixels of a token,
# S (N, L, H, D, M), z (N, L, H, D), last (N, background_dim) of models with a background; on a GPU
# tokens (N,) int64, in a slot's state, of models that skip or read, and pairs, scale and saturated
# for a state in float16. Empty where there is no use for it.
POOLS = ("canvas", "known", "S", "z", "last", "tokens", "pairs", "scale", "saturated")
# Lines of (6, B) int64. No slot appears twice except 0, whose rows are padding · conditioned:
# whether known sub-pixels were read, and are skipped.
ROWS = ("slot", "position", "steps", "start", "seed", "conditioned")
LIMITS = ("steps", "passes", "threads")
# Precisions of the layers' matrix products. int8 leaves out the feed-forwards of the first and last
# layer, which would cost more likelihood than all other products together: they are bf16, or fp32
# if the processor has no fast bf16. There are no GPU kernels for int8.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def pools_of(**tensors: Tensor | None) -> list[Tensor]:
    """Tensors by their names in POOLS, in that order; empty ones for those that are left out."""
    assert tensors.keys() <= set(POOLS)
    found = []
    for name in POOLS:
        tensor = tensors.get(name)
        if tensor is None:
            tensor = torch.empty(0)
        found.append(tensor)
    return found


def rows_of(**lines: Any) -> Tensor:
    """(6, B) int64 of the names in ROWS; those that are left out are 0. `slot` decides B."""
    assert lines.keys() <= set(ROWS)
    rows = torch.zeros(len(ROWS), len(lines["slot"]), dtype=torch.int64)
    for line, name in zip(rows, ROWS, strict=True):
        if name in lines:
            line[:] = torch.as_tensor(lines[name])
    return rows


def _round_up(n: int, unit: int = TILE) -> int:
    return -(-n // unit) * unit


def pack_matrix(weight: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Rearrange a linear layer's weight (groups * columns, depth) into panels; returns one
    dimension.

    A group's columns and the depth are padded with zeros to multiples of 16. Blocks of 16 columns
    are distributed as evenly as possible to panels of at most 4 blocks. Within a panel, one k
    follows another (bfloat16: pairs of k, int8: groups of four), each with its blocks side by side,
    so a step reads the panel from start to end.
    """
    pair = max(1, 4 // dtype.itemsize)
    columns, depth = weight.shape[0] // groups, weight.shape[1]
    padded = weight.new_zeros(groups, _round_up(columns), _round_up(depth))
    padded[:, :columns, :depth] = weight.unflatten(0, (groups, columns))
    # (groups, blocks, 16, k, pair)
    blocks = padded.unflatten(1, (-1, TILE)).unflatten(3, (-1, pair))
    panels = -(-blocks.shape[1] // PANEL)
    packed = []
    for group in blocks:
        for panel in torch.tensor_split(group, panels):
            packed.append(panel.permute(2, 0, 1, 3).flatten())
    return torch.cat(packed).to(dtype)


def narrowest(weight: Tensor, dtype: torch.dtype) -> torch.dtype:
    """How a processor stores a matrix of this precision: bfloat16 weights in half of the bytes of
    float32, in which the kernels multiply them all the same.
    """
    if dtype == torch.float32 and weight.equal(weight.bfloat16().float()):
        return torch.bfloat16
    return dtype


def pack_bias(bias: Tensor, groups: int, unit: int = TILE) -> Tensor:
    """Pad each group of a bias (groups * columns) to a multiple of unit; returns float32."""
    columns = bias.shape[0] // groups
    padded = bias.new_zeros(groups, _round_up(columns, unit))
    padded[:, :columns] = bias.unflatten(0, (groups, columns))
    return padded.flatten().float()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (columns, depth) as integers from -127 to 127, stored as floats, and the scale
    (columns,) per column.
    """
    scale = weight.abs().amax(1) / 127
    return (weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().clamp(
        -127, 127
    ), scale


def pack_tiles(weight: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """pack_matrix for a GPU: tiles of 8 columns, each with stages of 32 k; returns one dimension.

    A group's columns and the depth are padded with zeros to multiples of 32. A bfloat16 stage
    holds, for one lane of a warp after another, the lane's operands of two mma.m16n8k16: column
    lane / 4, and pairs of k from lane % 4 * 2 + (0, 8, 16, 24) on. A float32 stage holds one k
    after another, each with its 8 columns.
    """
    columns, depth = weight.shape[0] // groups, weight.shape[1]
    padded = weight.new_zeros(groups, _round_up(columns, GPU_TILE), _round_up(depth, GPU_TILE))
    padded[:, :columns, :depth] = weight.unflatten(0, (groups, columns))
    # (tiles, 8, stages, 32)
    tiles = padded.flatten(0, 1).unflatten(0, (-1, 8)).unflatten(2, (-1, GPU_TILE))
    if dtype == torch.float32:
        return tiles.permute(0, 2, 3, 1).flatten()
    lanes = tiles.unflatten(3, (4, 4, 2))  # k: pair within the lane, lane % 4, half of the pair
    return lanes.permute(0, 2, 1, 4, 3, 5).flatten().to(dtype)


def pack_state(S: Tensor) -> Tensor:
    """S (..., 32, 32) in the order in which a GPU's matrix units take it (csrc/cuda/recall.h), of
    the same shape.

    Two parts of two steps each; in a step the 32 lanes of a warp; of each lane 8 numbers: columns
    lane / 4 * 4 + part * 2 and the next, at key dims step * 8 + lane % 4 * 2 and the next, and at
    those 16 further on.
    """
    # (..., 16 key dims, step, lane % 4, 2 key dims; lane / 4, part, 2 columns)
    numbers = S.unflatten(-2, (2, 2, 4, 2)).unflatten(-1, (8, 2, 2))
    return numbers.movedim((-2, -6, -3, -5, -7, -1, -4), tuple(range(-7, 0))).reshape(S.shape)


@dataclass(frozen=True, slots=True)
class Packed:
    """A model in the form that csrc's operators take.

    weights: table, source, base, place, marginal, final norm (weight, bias), head (weight, bias);
    for a background project, table, head (weight, bias), else four empty tensors; and for each
    layer qkv, out, norm1, up, down, norm2 (weight, bias each). sizes: those of sizes_of, in order.
    """

    weights: list[Tensor]
    sizes: list[int]
    eps: float
    team: Team = field(default_factory=Team, compare=False)

    def to(self, device: str) -> "Packed":
        return Packed([weight.to(device) for weight in self.weights], self.sizes, self.eps)

    @property
    def model(self) -> tuple[list[Tensor], list[int], float]:
        """As the operators take it."""
        return self.weights, self.sizes, self.eps

    @property
    def step_bytes(self) -> int:
        """Bytes of the layers' packed matrices, which every step reads."""
        layers = self.weights[_BEFORE_LAYERS:]
        return sum(w.nbytes for i, w in enumerate(layers) if i % _EACH_LAYER in (0, 2, 6, 8))

    def decode(
        self,
        pools: list[Tensor],
        rows: Tensor,
        temperatures: Tensor,
        *,
        passes: int | None = None,
        log_probs: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Advance each of B rows from its position by its number of steps. Positions and steps
        count tokens.

        pools, rows: see POOLS and ROWS; canvas, S, z and last are changed in place, canvas except
            where known is set · temperatures: (B,) float32
        passes: a row stops earlier, before the step that would be its (passes + 1)-th through the
                layers.
        Returns the log-probability of each sub-pixel at temperature 1, (B, sub-pixels in the
        largest number of steps) float32 in nats, 0 after a row's last one, or (B, 0) unless
        log_probs asks for them; (B,) bool, false where a row's parameters were not finite; and,
        (B,) int64 each, the steps that each row took, and how many of them went through the layers.
        """
        slots, _, steps, *_ = rows.numpy()  # not torch's: see server/engine/decode/decoder.py
        most = int(steps[slots != 0].max(initial=0))
        if passes is None:
            passes = most
        threads, patience = self.team.choose(len(slots))
        began = time.perf_counter()
        found, finite, taken, passed = torch.ops.linpix.decode_quantum(
            pools,
            rows,
            temperatures,
            *self.model,
            [most, passes, threads],
            patience,
            log_probs,
        )
        self.team.learn(
            len(slots), threads, int(passed.numpy().max(initial=0)), time.perf_counter() - began
        )
        return found, finite, taken, passed

    def prefill(self, pools: list[Tensor], rows: Tensor) -> None:
        """Fold the next inputs of each row into its slot, from its position on: start token, x_0,
        x_1 and so on.

        The result is the same, bit for bit, as after this number of steps of decode, or after
        several calls. Pools and rows as in decode; seeds do not count.
        """
        most = int(rows[ROWS.index("steps")].max())
        torch.ops.linpix.prefill(pools, rows, *self.model, most, torch.get_num_threads())

    def read(self, inputs: Sequence[Tensor], state: Any, slots: Tensor) -> Tensor:
        """Fold each row's inputs of the first layer into its slot.

        inputs: B tensors (n, d_model) float32, n at least 1 · state: has S, z and last, for slots
        (B,) as in decode · returns the final features of each row's last token, (B, d_model)
        float32.
        """
        offsets = torch.tensor([0, *accumulate(map(len, inputs))])
        features: Tensor = torch.ops.linpix.read(
            pools_of(S=state.S, z=state.z, last=state.last),
            slots,
            torch.cat([*inputs]),
            offsets,
            *self.model,
            max(map(len, inputs)),
            torch.get_num_threads(),
        )
        return features


@torch.no_grad()
def pack(net: Transformer, dtype: torch.dtype, *, gpu: bool = False) -> Packed:
    """Pack a model's weights for csrc.

    dtype: of the layers' matrices, one of PRECISIONS; everything else, such as the head, stays
    float32 · gpu: use the layout of the CUDA kernels. The tensors stay on the model's device;
    `Packed.to` moves them.
    """
    config = net.config
    assert (config.attention, config.feature_map, config.residual) == (
        "linear",
        "elu+1",
        "plain",
    ), "choice.py lets nothing else come here"

    wider = dtype  # of the matrices that are never int8
    if dtype == torch.int8:
        assert not gpu, "gpu_obstacle lets no int8 come here"
        wider = torch.bfloat16 if torch.ops.linpix.cpu_has_fast_bf16() else torch.float32

    def matrix(
        weight: Tensor, bias: Tensor, groups: int = 1, dtype: torch.dtype = dtype
    ) -> list[Tensor]:
        weight, bias = weight.float(), bias.float()
        if dtype == torch.int8:
            weight, scale = quantise(weight)
            factors = (bias, scale, scale * weight.sum(1))
            return [
                pack_matrix(weight, groups, dtype),
                torch.cat([pack_bias(factor, groups) for factor in factors]),
            ]
        if gpu:
            return [pack_tiles(weight, groups, dtype), pack_bias(bias, groups, GPU_TILE)]
        return [pack_matrix(weight, groups, narrowest(weight, dtype)), pack_bias(bias, groups)]

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().float().clone()

    def norm(module: nn.LayerNorm) -> list[Tensor]:
        return [copied(module.weight), copied(module.bias)]

    inputs = net.inputs
    source = torch.where(inputs.outside, -1, inputs.source).to(torch.int32).contiguous()
    marginal = torch.tensor(config.first_marginal, dtype=torch.float64).cumsum(0)

    # float32 matrices outside the layers; on a GPU unpacked
    def exact(weight: Tensor, groups: int) -> Tensor:
        weight = weight.detach().float()
        return weight.T.contiguous() if gpu else pack_matrix(weight, groups, torch.float32)

    def head(linear: nn.Linear) -> list[Tensor]:
        bias, count = linear.bias.detach().float(), parameters_per_token(config) // mixtures
        return [exact(linear.weight, count), bias.clone() if gpu else pack_bias(bias, count)]

    mixtures = categorical.VALUES if config.head == "categorical" else config.mixtures
    skipped = [torch.empty(0)] * 4
    background = net.background if isinstance(net, Conditional) else None
    if background is not None:
        skipped = [
            exact(background.project.weight, 1),
            copied(background.table),
            *head(background.head),
        ]
    weights = [
        copied(inputs.table),
        source,
        inputs.base[0].to(torch.int32).contiguous(),
        inputs.positional.to(torch.int32).contiguous(),
        marginal,
        *norm(net.norm),
        *head(net.head),
        *skipped,
    ]
    for index, layer in enumerate(net.layers):
        assert isinstance(layer, Layer)
        feed_forward = dtype if 0 < index < config.layers - 1 else wider
        # each head's q, k, v side by side
        by_head, bias = (
            torch.cat(_heads(part, config), 1).flatten(0, 1)
            for part in (layer.qkv.weight, layer.qkv.bias)
        )
        weights += [
            *matrix(by_head, bias, config.heads),
            *matrix(layer.out.weight, layer.out.bias),
            *norm(layer.norm1),
            *matrix(layer.up.weight, layer.up.bias, dtype=feed_forward),
            *matrix(layer.down.weight, layer.down.bias, dtype=feed_forward),
            *norm(layer.norm2),
        ]
    sizes = sizes_of(config, mixtures, inputs.class_rows, bf16=wider == torch.bfloat16).values()
    return Packed(weights, [int(size) for size in sizes], config.eps)


def sizes_of(config: ModelConfig, mixtures: int, class_rows: int, *, bf16: bool) -> dict[str, int]:
    """What the weights do not say, by name, in the order of csrc/order.h.

    mixtures: K, or the logits of a categorical head · class_rows: first row of the classes' table ·
    bf16: whether inputs of products are rounded to bfloat16, where they are not bytes
    """
    background = -1 if config.background is None else config.background
    return {
        "heads": config.heads,
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "mixtures": mixtures,
        "classes": config.classes,
        "pre_norm": config.norm == "pre",
        "gelu": config.activation == "gelu",
        "elu_scale": config.scale_transform == "elu",  # draws with the published sampler's scale
        "following": len(config.following),
        "class_rows": class_rows,
        "background": background,
        "token_size": config.token_size,
        "categorical": config.head == "categorical",
        "bf16": bf16,
    }


def _heads(qkv: Tensor, config: ModelConfig) -> list[Tensor]:
    """q, k and v of a qkv weight or bias, each (H, D or M, ...)."""
    keys, values = config.heads * config.key_dim, config.heads * config.value_dim
    return [part.unflatten(0, (config.heads, -1)) for part in qkv.split([keys, keys, values])]


@torch.no_grad()
def state_scale(net: Transformer) -> Tensor:
    """Powers of two, (L, H), such that no |S| / scale can exceed float16's 65,504 in an image. This
    is a proven bound.

    The input of a layer's projection is bounded by its LayerNorm (the normalised row has length
    sqrt(d_model)), or, in the first layer of a post-norm model, by the summed look-ups or the parts
    of a patch. So keys and values are bounded too, and S is at most their product times the number
    of tokens. Rounding to bfloat16 adds at most 2^-8, relative: to weights and inputs, so the bound
    is on the sum of magnitudes, and to keys and values that wait in pairs. Rounding S adds at most
    2^-11 each time, once in eight tokens, and once as a read state is loaded. The last factor
    covers float32's own rounding, thousands of additions with 2^-24 each. The bound is loose, which
    costs nothing: float16 keeps its 11 bits down to 2^-14 of a scale.
    """
    config, largest, before = net.config, [], None
    tokens = config.length + (config.patches + 1 if config.patch else 0)
    for layer in net.layers:
        assert isinstance(layer, Layer)
        norm = layer.norm1 if config.norm == "pre" else before
        weight, bias = layer.qkv.weight.double().abs(), layer.qkv.bias.double().abs()
        if norm is None:
            sums = _largest_sums(net, weight)
        else:
            lengths = (weight * norm.weight).norm(dim=1)
            sums = lengths * config.d_model**0.5 + weight @ norm.bias.double().abs()
        _, k, v = _heads(sums * (1 + 2**-8) ** 2 + bias, config)
        products = (1 + k.amax(1)) * v.amax(1) * (1 + 2**-8) ** 2
        largest.append(products * tokens * (1 + 2**-11) ** (tokens / 8 + 1) * 1.01)
        before = layer.norm2
    return torch.exp2(torch.ceil(torch.log2(torch.stack(largest) / 65504)).clamp(-20, 60)).float()


def _largest_sums(net: Transformer, weight: Tensor) -> Tensor:
    """Bounds on the first layer's inputs times the magnitudes of a weight, (columns,)."""
    inputs = net.inputs
    look_ups = inputs.base.shape[-1] + inputs.positional.shape[-1] + (inputs.class_rows > 0)
    sums = (inputs.table.double().abs() @ weight.T).amax(0) * look_ups
    if isinstance(net, Conditional) and net.patches is not None:
        linear, place, query = net.patches.linear, net.patches.place, net.patches.query
        # its inputs are values and flags of at most 1
        patch = linear.weight.double().abs().sum(1) + linear.bias.double().abs()
        patch = patch + place.double().abs().amax(0)
        sums = sums.maximum(weight @ patch).maximum(weight @ query.double().abs())
    return sums
