"""The backends of a comparison: a network with one kind of attention, stepping on memory or
recomputing everything.

`linear` and `stateful-softmax` keep a memory per image and take one step per token. `softmax`,
`lsh-1` and `lsh-4` are the paper's baselines: they keep nothing but the image, and run the parallel
form over the whole prefix at every position. `linear` also runs in the compiled engine, if that is
available.
"""

import dataclasses
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from linpix.model import plugins
from linpix.model.attention import State, kind_of
from linpix.model.attention.linear import RecurrentState
from linpix.model.choice import choose
from linpix.model.config import ModelConfig
from linpix.model.generate import decode_threads, draw_token
from linpix.model.inputs import START
from linpix.model.nets import net_for
from linpix.model.packing import PRECISIONS, pack, pools_of, rows_of
from linpix.model.transformer import Attend, Transformer

QUANTUM_S = 0.05  # longest call of the compiled engine, about: live requests wait for its end
# most tokens x d_model x hashings of a parallel pass: bounds memory; more is not faster
PASS_SIZE = 2**19

# what selects each in a configuration; cheapest first: the order of surveys
ATTENTION: dict[str, dict[str, Any]] = {
    "linear": {"attention": "linear"},
    "stateful-softmax": {"attention": "softmax"},
    "softmax": {"attention": "softmax"},
    "lsh-1": {"attention": "lsh", "lsh_rounds": 1},
    "lsh-4": {"attention": "lsh", "lsh_rounds": 4},
}
STATEFUL = ("linear", "stateful-softmax")


def backends() -> tuple[str, ...]:
    """The names of all backends; a kind of attention that a plugin registers is one."""
    return (*ATTENTION, *plugins.names_of("attention"))


def is_stateful(backend: str) -> bool:
    """Whether it steps on a memory; others compute the whole prefix again at each position."""
    return backend in STATEFUL or (backend not in ATTENTION and bool(kind_of(backend).steps_as))


class Backend:
    """A network, and the memory of the images that it decodes, in slots 1..rows, if it keeps
    one.
    """

    engine, precision = "eager", "fp32"
    stride = 1  # most tokens in one call of step

    def __init__(self, name: str, net: Transformer, rows: int) -> None:
        self.name, self.net, self.rows = name, net, rows
        if name == "linear":  # without our operator: eager backends are compared in torch alone
            self.state: State | None = RecurrentState(net.config, rows, operator=False)
        else:
            self.state = net.attention.new_state(rows) if is_stateful(name) else None
        self._slots = torch.arange(1, rows + 1)
        self._start = torch.full((rows,), START)
        self._temperatures = torch.ones(rows)
        self.canvas = torch.randint(
            256,
            (rows, net.config.subpixels),
            dtype=torch.uint8,
            # for steps that are timed
            generator=torch.Generator().manual_seed(0),
        )
        # without a start token: 1
        self.first, length = net.config.first, net.config.length
        first, tenth = min(self.first, length - 1), max(1, length // 10)
        # positions of a survey
        self.coarse = sorted({first, length // 4, length // 2, length * 3 // 4, length - 1})
        self.positions = sorted(
            {
                *self.coarse,
                max(first, tenth // 2),
                max(first, tenth - 1),
                length - tenth,
                length - 1 - tenth // 2,
            }
        )
        # seconds of a step, by rows and position
        self.samples: dict[tuple[int, int], list[float]] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes per image, beside its sub-pixels; 0 for backends that compute prefixes again."""
        return self.net.attention.state_bytes if self.state is not None else 0

    def together(self, batch: int, t: int) -> int:
        """Rows of a batch in one pass through the network: all, or as many whole prefixes as
        PASS_SIZE allows.
        """
        if self.state is not None:
            return batch
        rounds, config = fields_of(self.name).get("lsh_rounds"), self.net.config
        # lsh pads to whole chunks
        tokens = rounds * max(t + 1, config.lsh_chunk) if rounds else t + 1
        return min(batch, max(1, PASS_SIZE // config.d_model // tokens))

    def fill(self) -> Iterator[None]:
        """Give every slot the memory of a whole image, as prefill would.

        The cost of a step depends on its position and not on values. But memory that was never
        written is one page of zeros, always in the cache, which would favour backends that keep
        much.
        """
        if (state := self.state) is not None:
            yield from self._parallel(
                self.canvas[:1],
                self.net.config.length - 1,
                lambda layer, q, k, v: state.prefill(layer, q, k, v, self._slots[:1]),
            )
            for slot in range(2, self.rows + 1):
                state.copy(1, [slot])
                yield

    def difference(self) -> Generator[None, None, float]:
        """Largest difference of the mixture parameters between a step and the parallel form over
        the prefix.

        To be called after `fill`, of whose image it looks at some positions.
        """
        assert self.state is not None
        canvas, length, worst = self.canvas[:1], self.net.config.length, 0.0
        for last in sorted({self.coarse[0], length // 8, length // 4, length // 2, length - 1}):
            for t in range(max(self.first, last - 3), last + 1):  # each writes its token again
                stepped = self.net.step(
                    canvas, torch.tensor([t]), self._start[:1], self.state, self._slots[:1]
                )
                yield
            if last >= self.first:
                recomputed = yield from self._parallel(canvas, last, self.net.attention.parallel)
                worst = max(worst, float((stepped - recomputed).abs().max()))
        return worst

    def clear(self, rows: int) -> Iterator[None]:
        if self.state is not None:
            for slot in range(1, rows + 1):
                self.state.clear(slot)
                yield

    @torch.inference_mode()
    def step(self, canvas: Tensor, t: int, u: Tensor) -> Generator[None, None, None]:
        """Predict and draw token t of the images in slots 1..B. canvas: (B, T) · u: (B, C, 2)."""
        rows, C = len(canvas), self.net.config.token_size
        positions = torch.full((rows,), t)
        if self.state is None:
            parameters = yield from self._parallel(canvas, t, self.net.attention.parallel)
        else:
            with decode_threads(self.net, rows, t):
                parameters = self.net.step(
                    canvas, positions, self._start[:rows], self.state, self._slots[:rows]
                )
        canvas[:, t * C : (t + 1) * C] = draw_token(
            self.net, parameters, positions, u, self._temperatures[:rows]
        )

    @torch.inference_mode()
    def _parallel(self, canvas: Tensor, t: int, attend: Attend) -> Generator[None, None, Tensor]:
        """Mixture parameters of token t, (B, P), by the parallel form over its prefix, layer by
        layer.
        """
        net, rows = self.net, len(canvas)
        if t < self.first:
            return torch.full((rows, net.head.out_features), torch.nan)
        positions = torch.arange(self.first, t + 1).expand(rows, -1)
        x = net.embed(canvas, positions, self._start[:rows])
        for index, layer in enumerate(net.layers):
            x = layer(x, index, attend)
            yield
        return net.output_head(x[..., -1, :])


class CompiledBackend(Backend):
    """Linear attention in the compiled engine. A step draws an image row, in calls of about
    QUANTUM_S.
    """

    engine = "compiled"

    def __init__(self, net: Transformer, rows: int) -> None:
        super().__init__("linear", net, rows)
        assert isinstance(self.state, RecurrentState)
        self.precision = choose(net.config).precision
        self.stride = net.config.row_length
        self._packed = pack(net, PRECISIONS[self.precision])
        self._canvas = torch.zeros(rows + 1, net.config.subpixels, dtype=torch.uint8)
        unknown = torch.zeros_like(self._canvas, dtype=torch.bool)
        self._pools = pools_of(canvas=self._canvas, known=unknown, S=self.state.S, z=self.state.z)
        self._quantum = 1  # tokens of the next call, from the speed of the last one

    def step(self, canvas: Tensor, t: int, u: Tensor) -> Generator[None, None, None]:
        """Draw tokens t .. t + stride - 1, image i with seed i. u is ignored: the engine draws its
        own noise.
        """
        rows, C = len(canvas), self.net.config.token_size
        end = min(t + self.stride, self.net.config.length)
        while t < end:
            count = min(self._quantum, end - t)
            numbers = rows_of(
                slot=self._slots[:rows],
                position=[t] * rows,
                steps=[count] * rows,
                start=self._start[:rows],
                seed=range(rows),
            )
            began = time.perf_counter()
            self._packed.decode(self._pools, numbers, self._temperatures[:rows])
            self._quantum = max(1, int(QUANTUM_S * count / (time.perf_counter() - began)))
            done = slice(t * C, (t + count) * C)
            canvas[:, done] = self._canvas[1 : rows + 1, done]
            t += count
            yield


def fields_of(backend: str) -> dict[str, Any]:
    """What selects a backend in a configuration."""
    return ATTENTION.get(backend, {"attention": backend})


def config_of(backend: str, config: ModelConfig) -> ModelConfig:
    """The configuration of a backend's weights: `config` with that backend's attention."""
    return dataclasses.replace(config, **fields_of(backend))


def random_net(config: ModelConfig) -> Transformer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return net_for(config).eval().requires_grad_(False)
