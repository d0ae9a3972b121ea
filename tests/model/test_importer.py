import argparse
import io
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from linpix.model.attention import attention_for
from linpix.model.config import bits_per_dim
from linpix.model.generate import generate
from linpix.model.importer import ImporterError, import_reference
from linpix.model.inputs import START
from linpix.model.mixture import log_likelihood

ATTENTIONS = ["linear", "softmax"]
HEADS = 2


@pytest.fixture(scope="module", params=ATTENTIONS)
def reference(request, golden):
    """The imported network, and what the published implementation says of it."""
    stem = golden / f"reference_{request.param}_2x32"
    net, _ = import_reference(stem.with_suffix(".pth"), HEADS, request.param)
    return net, np.load(stem.with_suffix(".npz"))


def test_logits_equal_the_published_ones_in_parallel(reference):
    net, expected = reference
    found = net.parameters_of(expected["images"])
    assert bool(found[:, 0].isnan().all())
    np.testing.assert_allclose(found[:, 1:], expected["logits"], rtol=0, atol=1e-5)


def test_logits_equal_the_published_ones_step_by_step(reference):
    net, expected = reference
    canvas, slots = torch.from_numpy(expected["images"]), torch.tensor([3, 1, 4, 2])
    state, start = attention_for(net.config).new_state(4), torch.full((4,), START)
    found = [net.step(canvas, torch.full((4,), t), start, state, slots) for t in range(784)]
    assert bool(found[0].isnan().all())
    np.testing.assert_allclose(torch.stack(found[1:], 1), expected["logits"], rtol=0, atol=1e-5)


def test_bits_per_dim_equal_the_published_loss(reference):
    """The published loss is about x_1 .. x_783, and takes a density where a probability is below
    1e-5.
    """
    net, expected = reference
    images = torch.from_numpy(expected["images"])
    nats = -log_likelihood(net.parameters_of(images), images)[:, 1:].double().mean(0).sum()
    found = bits_per_dim(float(nats), net.config) * 784 / 783
    assert found == pytest.approx(float(expected["bits_per_dim"]), abs=1e-5)


# What follows needs no golden vectors: networks of the published form with random weights, of our
# making.


def published(
    positions: int = 783, values: int = 6, width: int = 10, value_width: int = 7, mixtures: int = 2
) -> OrderedDict[str, Tensor]:
    """Tensors of two layers: d_model 10 in tables of 7 and 3, keys of 10, values of `values`, d_ff
    12.
    """
    random = torch.Generator().manual_seed(positions)
    shapes = {
        "value_embedding.weight": (256, value_width),
        "pos_embedding.pe": (1, positions, width - value_width),
    }
    for layer in ("transformer.layers.0", "transformer.layers.1"):
        for name, outputs, inputs in (
            ("attention.query_projection", width, width),
            ("attention.key_projection", width, width),
            ("attention.value_projection", values, width),
            ("attention.out_projection", width, values),
            ("linear1", 12, width),
            ("linear2", width, 12),
        ):
            shapes |= {
                f"{layer}.{name}.weight": (outputs, inputs),
                f"{layer}.{name}.bias": (outputs,),
            }
        for name in ("norm1", "norm2"):
            shapes |= {f"{layer}.{name}.weight": (width,), f"{layer}.{name}.bias": (width,)}
    shapes |= {
        "transformer.norm.weight": (width,),
        "transformer.norm.bias": (width,),
        "predictor.weight": (3 * mixtures, width),
        "predictor.bias": (3 * mixtures,),
    }
    return OrderedDict(
        (name, torch.randn(shape, generator=random) * 0.4) for name, shape in shapes.items()
    )


def predict(state: OrderedDict[str, Tensor], x: Tensor, attention: str) -> Tensor:
    """The network written as it was published: x_0 .. x_{T-2} in, parameters of x_1 .. x_{T-1}
    out.
    """

    def of(name: str) -> tuple[Tensor, Tensor]:
        return state[f"{name}.weight"], state[f"{name}.bias"]

    positions = state["pos_embedding.pe"].expand(len(x), -1, -1)
    h = torch.cat([state["value_embedding.weight"][x.long()], positions], -1)
    for index in range(2):
        layer = f"transformer.layers.{index}"
        projected = (
            F.linear(h, *of(f"{layer}.attention.{name}_projection"))
            for name in ("query", "key", "value")
        )
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in projected)
        scores = (
            (q @ k.mT / q.shape[-1] ** 0.5).exp()
            if attention == "softmax"
            else (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        ).tril()
        y = (scores @ v / scores.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)
        y = F.linear(y, *of(f"{layer}.attention.out_projection"))
        h = F.layer_norm(h + y, (10,), *of(f"{layer}.norm1"))
        y = F.linear(F.relu(F.linear(h, *of(f"{layer}.linear1"))), *of(f"{layer}.linear2"))
        h = F.layer_norm(h + y, (10,), *of(f"{layer}.norm2"))
    return F.linear(F.layer_norm(h, (10,), *of("transformer.norm")), *of("predictor"))


@pytest.fixture
def write(tmp_path):
    """Write a reference file: keywords replace, add or (None) remove entries of the outermost
    dict.
    """

    def write(state=None, **entries) -> Path:
        path = tmp_path / "reference.pth"
        data = {"model_state": published() if state is None else state, "iteration": 7} | entries
        torch.save({name: entry for name, entry in data.items() if entry is not None}, path)
        return path

    return write


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tables_of_unequal_width_and_values_narrower_than_keys_are_understood(attention, write):
    state = published()
    net, provenance = import_reference(write(state), HEADS, attention)
    assert (net.config.key_dim, net.config.value_dim, net.config.d_model) == (5, 3, 10)
    assert provenance["steps"] == 7 and provenance["imported_from"] == "reference.pth"
    assert not net.training
    images = torch.randint(
        0, 256, (2, 784), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    torch.testing.assert_close(
        net.parameters_of(images)[:, 1:],
        predict(state, images[:, :-1], attention),
        rtol=0,
        atol=2e-5,
    )


def test_28_by_28_begins_with_0_unless_the_data_say_otherwise(write):
    net, _ = import_reference(write(), HEADS)
    assert (net.config.height, net.config.width, net.config.channels) == (28, 28, 1)
    assert net.config.scale_transform == "elu"  # as the published sampler draws
    assert generate(net, [1, 2, 3])[:, 0].tolist() == [0, 0, 0]
    marginal = (0.0,) * 9 + (1.0,) + (0.0,) * 246
    net, _ = import_reference(write(), HEADS, first_marginal=lambda _: marginal)
    assert net.config.first_marginal == marginal


def test_32_by_32_needs_the_data(write):
    path = write(published(positions=3071))
    with pytest.raises(ImporterError, match=r"32 x 32 x 3 need .* folder as --data"):
        import_reference(path, HEADS)
    net, _ = import_reference(path, HEADS, first_marginal=lambda _: [1 / 256] * 256)
    assert (net.config.height, net.config.width, net.config.channels) == (32, 32, 3)


@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        *((heads, "10 rows of .*query_proj") for heads in (0, -2, 3, 4, 20)),
        (5, "6 rows of .*value_projection"),
    ],
)
def test_heads_that_do_not_divide_every_projection_are_refused(heads, rows, write):
    """4 divides neither 10 nor 6; 3 divides the values' 6, but not the queries' 10."""
    with pytest.raises(ImporterError, match=rf"--heads must divide the {rows}.*got {heads}"):
        import_reference(write(), heads)


def test_attention_that_we_do_not_have_is_refused(write):
    with pytest.raises(
        ImporterError, match=r"--attention must be one of linear, softmax.*got 'reformer'"
    ):
        import_reference(write(), HEADS, "reformer")


QUERY = "transformer.layers.0.attention.query_projection.weight"
TENSORS = {
    "missing": (
        {"transformer.layers.1.linear2.bias": None},
        r"lacks tensor transformer\.layers\.1\.linear2\.bias",
    ),
    "needed for shapes": ({QUERY: None}, f"lacks tensor {QUERY}"),
    "unknown": (
        {"transformer.layers.0.gate": torch.zeros(1)},
        r"has unknown tensor transformer\.layers\.0\.gate",
    ),
    "a layer left out": (
        {"transformer.layers.3.norm1.bias": torch.zeros(10)},
        r"lacks tensor transformer\.layers\.2",
    ),
    "misshapen": (
        {"transformer.norm.weight": torch.zeros(9)},
        r"tensor transformer\.norm\.weight .*\(10,\), got \(9,\)",
    ),
    "few values": (
        {"value_embedding.weight": torch.zeros(255, 7)},
        r"value_embedding.weight .*\(256, 7\), got \(255, 7\)",
    ),
    "flat": (
        {QUERY: torch.zeros(10)},
        rf"tensor {QUERY} must have 2 dimensions, got shape \(10,\)",
    ),
    "empty": ({QUERY: torch.zeros(0, 10)}, "key_dim must be an integer of at least 1, got 0"),
    "another image": (
        {"pos_embedding.pe": torch.zeros(1, 784, 3)},
        r"783 \(28 x 28 x 1\) or 3071 .*got 784",
    ),
    "no mixture": (
        {"predictor.weight": torch.zeros(256, 10)},
        r"predictor\.weight must have 3 rows per mixture, got 256",
    ),
    "NaN": (
        {"predictor.bias": torch.full((6,), torch.nan)},
        r"tensor predictor\.bias holds values that are",
    ),
    "integers": (
        {"predictor.bias": torch.zeros(6, dtype=torch.int64)},
        r"predictor\.bias must be .*got torch\.int64",
    ),
    "sparse": (
        {"predictor.bias": torch.zeros(6).to_sparse()},
        "predictor.bias must be a dense tensor",
    ),
    "no tensor": ({"predictor.bias": [0.0] * 6}, "predictor.bias must be .*got list"),
}


@pytest.mark.parametrize(("changes", "message"), TENSORS.values(), ids=TENSORS)
def test_a_wrong_tensor_is_refused_by_name(changes, message, write):
    state = published()
    for name, tensor in changes.items():
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    path = write(state)
    with pytest.raises(ImporterError, match=message) as error:
        import_reference(path, HEADS)
    assert str(path) in str(error.value)


def renamed(change) -> dict[str, Tensor]:
    return {change(name): tensor for name, tensor in published().items()}


def after(prefix: str, **others) -> dict[str, Tensor]:
    return renamed(lambda name: prefix + name) | others


OTHER = {name: -tensor for name, tensor in published().items()}
WRAPPED = {
    "bare": published(),
    "DataParallel": {"model_state": after("module."), "iteration": 7},
    "Lightning": {
        "state_dict": after("model."),
        "global_step": 7,
        "epoch": 1,
        "loops": {"fit_loop": {}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}],
    },
    "Lightning, with a loss of its own": {
        "state_dict": after("net.", **{"loss.weight": torch.ones(2)})
    },
    "compiled": {"model": after("_orig_mod.")},
    "compiled inside": {
        "net": renamed(lambda name: name.replace("transformer.", "transformer._orig_mod."))
    },
    "distributed and compiled, in a wrapper": {
        "model_state_dict": after("module._orig_mod.generator.")
    },
    "averaged by torch": after("module.", n_averaged=torch.tensor(9)),
    "averaged beside it": {"model": OTHER, "model_ema": {"decay": 0.99, "module": published()}},
    "averaged in one dict": {
        "state_dict": {f"net.{name}": OTHER[name] for name in OTHER} | after("ema.module.")
    },
    "averaged among bare names": OTHER | after("ema_model."),
    "averages without names": {"model": published(), "ema": {"shadow_params": [torch.zeros(2)]}},
    "an ordered dict in an own place": {"checkpoint": {"weights": OrderedDict(published())}},
}


@pytest.mark.parametrize("saved", WRAPPED.values(), ids=WRAPPED)
def test_the_tensors_are_found_however_a_trainer_has_wrapped_them(saved, tmp_path, write):
    torch.save(saved, tmp_path / "theirs.pth")
    net, provenance = import_reference(tmp_path / "theirs.pth", HEADS)
    expected, _ = import_reference(write(), HEADS)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], tensor), name
    assert provenance.get("steps") == (7 if {"iteration", "global_step"} & saved.keys() else None)


def test_safetensors_are_read_too(tmp_path, write):
    save_file(after("model."), tmp_path / "theirs.safetensors")
    net, _ = import_reference(tmp_path / "theirs.safetensors", HEADS)
    assert torch.equal(net.head.bias, published()["predictor.bias"])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (
            {
                "state_dict": {
                    name: tensor
                    for name, tensor in after("model.").items()
                    if "linear2.bias" not in name
                }
            },
            (
                r"theirs.pth \(state_dict, model\.\*\) lacks tensor"
                r" transformer\.layers\.0\.linear2\.bias"
            ),
        ),
        (
            {"state_dict": {"model.value_embedding.weight": torch.zeros(256, 7)}},
            r"\(state_dict, model\.\*\) lacks tensor pos_embedding\.pe",
        ),
        (after("") | {"loss.weight": torch.ones(2)}, "has unknown tensor loss.weight"),
        (
            {"state_dict": {"conv1.weight": torch.ones(2)}, "epoch": 3},
            (
                "lacks tensor value_embedding.weight, at any depth .* it has .*epoch.*state_dict,"
                " conv1.weight"
            ),
        ),
        (
            {"model_state": None, "iteration": 7},
            "lacks tensor value_embedding.weight.* it has model_state, iteration",
        ),
        ({"model_state": [1]}, "lacks tensor value_embedding.weight.* it has model_state"),
        ({"model_state": {1: torch.zeros(1)}}, "lacks tensor value_embedding.weight"),
        ({}, "lacks tensor value_embedding.weight"),
        ([published()], "lacks tensor value_embedding.weight.* it is list"),
    ],
)
def test_what_is_missing_is_named_as_it_is_in_the_file(saved, message, tmp_path):
    torch.save(saved, tmp_path / "theirs.pth")
    with pytest.raises(ImporterError, match=message) as error:
        import_reference(tmp_path / "theirs.pth", HEADS)
    assert str(tmp_path / "theirs.pth") in str(error.value)


def tower() -> list:
    """Lists within lists: thirty references, and a text of 2^30 words if all of it is written
    out.
    """
    floor: list = ["word"]
    for _ in range(30):
        floor = [floor, floor]
    return floor


def tower_of_dicts() -> dict:
    floor: dict = {}
    for _ in range(4):
        floor = {str(number): floor for number in range(1_000)}
    return floor


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_state": tower()}, "lacks tensor value_embedding.weight"),
        ({"model_state": tower_of_dicts()}, "lacks tensor value_embedding.weight"),
        (
            {"model_state": published() | {QUERY: torch.zeros(1).expand(2**40, 2**20)}},
            r"has shape \(1099511627776, 1048576\), but the file has less data than that",
        ),
        (
            {"model_state": published() | {QUERY: torch.zeros(10, 10, device="meta")}},
            "must be a dense tensor",
        ),
        (
            {"model_state": published() | {QUERY: torch.zeros(10, 10).to(torch.float8_e5m2)}},
            "got torch.float8_e5m2",
        ),
    ],
)
def test_what_would_take_all_memory_to_look_at_is_refused_by_name(entries, message, write):
    with pytest.raises(ImporterError, match=message):
        import_reference(write(**entries), HEADS)


def test_a_pickle_that_would_run_code_is_refused_unread(write):
    path = write(arguments=argparse.Namespace(layers=2))
    with pytest.raises(
        ImporterError,
        match=r"refused: it contains argparse\.Namespace.*only the model's state_dict",
    ):
        import_reference(path, HEADS)


def test_an_invalid_marginal_is_refused(write):
    with pytest.raises(ImporterError, match="first_marginal must hold 256 probabilities"):
        import_reference(write(), HEADS, first_marginal=lambda _: [0.5] * 256)


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "nothing.pth", tmp_path):
        with pytest.raises(ImporterError, match="cannot be read") as error:
            import_reference(path, HEADS)
        assert str(path) in str(error.value)


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("hello.txt", "hello")
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello, I am no checkpoint\n" * 9,
        b"\x89PNG\r\n\x1a\n" + bytes(99),
        b"\x80\x02",
        archive(),
    ],
    ids=["empty", "text", "PNG", "two bytes", "other zip"],
)
def test_a_file_that_is_not_from_torch_is_refused_as_such(raw, tmp_path):
    path = tmp_path / "reference.pth"
    path.write_bytes(raw)
    with pytest.raises(ImporterError, match="is not a torch file") as error:
        import_reference(path, HEADS)
    assert str(path) in str(error.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "as before torch 1.6"])
def test_a_truncated_file_is_called_truncated_wherever_it_ends(zipped, tmp_path):
    path = tmp_path / "reference.pth"
    torch.save(
        {"model_state": published(), "iteration": 7}, path, _use_new_zipfile_serialization=zipped
    )
    raw = path.read_bytes()
    import_reference(path, HEADS)
    for size in np.linspace(0, len(raw) - 1, 40).astype(int):
        path.write_bytes(raw[:size])
        with pytest.raises(ImporterError, match="is not a torch file, or is"):
            import_reference(path, HEADS)
