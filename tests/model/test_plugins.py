"""What a plugin may register, and what is said of one that is wrong."""

import dataclasses
import os

import pytest
import torch
from torch.nn import functional as F

from linpix.model import plugins
from linpix.model.attention import Attention, kinds, register_attention
from linpix.model.attention.recurrent import Recurrent
from linpix.model.config import PRESETS
from linpix.model.experimental.features import register_feature_map
from tests.nets import perturbed_net
from tools.harness.commands import ROOT

pytestmark = pytest.mark.usefixtures("no_plugins")
GATED = ROOT / "examples/gated.py"
TINY = PRESETS["tiny"]


def test_a_plugin_is_loaded_once_and_processes_started_from_here_load_it_too(monkeypatch):
    monkeypatch.chdir(GATED.parent)
    plugins.load("gated.py")
    plugins.load(f"./gated.py, {GATED}")
    assert kinds() == ("linear", "softmax", "lsh", "gated")
    assert os.environ[plugins.VARIABLE] == f"{GATED},{GATED}"


def test_the_variable_alone_is_enough(monkeypatch):
    with pytest.raises(ValueError, match=r"got 'gated'; .* give that plugin by --plugin or LINPIX"):
        dataclasses.replace(TINY, attention="gated")
    monkeypatch.setenv(plugins.VARIABLE, str(GATED))
    assert dataclasses.replace(TINY, attention="gated").attention == "gated"


def test_a_registered_feature_map_has_the_size_that_it_returns_and_both_forms_agree():
    def signs(x):
        return torch.cat([F.relu(x), F.relu(-x)], -1) + 1e-3

    register_feature_map("signs", signs)
    config = dataclasses.replace(TINY, feature_map="signs")
    assert config.feature_dim == 2 * TINY.key_dim
    net, images = perturbed_net(config), torch.randint(256, (2, 64), dtype=torch.uint8)
    slots, start = torch.tensor([2, 1]), torch.full((2,), 256)
    state = net.attention.new_state(2)
    stepped = []
    for t in range(64):
        stepped.append(net.step(images, torch.full((2,), t), start, state, slots))
    torch.testing.assert_close(torch.stack(stepped, 1), net(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "registers nothing; call register_attention or register_feature_map"),
        ("x = 1\nraise KeyError('w')\n", "line 2: KeyError: 'w'"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError: No module named"),
        ("def f(:\n", "SyntaxError"),
        (
            "from linpix.plugins import *\nregister_feature_map('a', abs)\n"
            "register_feature_map('a', abs)\n",
            "line 3: feature_map 'a' exists already; give yours another name",
        ),
        (
            "from linpix.plugins import *\nregister_feature_map('relu', abs)\n",
            "feature_map 'relu' exists already",
        ),
    ],
)
def test_a_plugin_that_is_wrong_is_named_with_the_reason_and_leaves_nothing(
    text, message, tmp_path
):
    plugin = tmp_path / "mine.py"
    plugin.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        plugins.load(str(plugin))
    assert str(refused.value).startswith(f"plugin {plugin}")
    assert plugins.names_of("feature_map") == () and os.environ[plugins.VARIABLE] == ""


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("/no/such.py", "there is no such file; check the path"),
        ("no_such_module", "there is no such module; install it, or give the path of a file"),
    ],
)
def test_a_plugin_that_is_missing_is_refused(plugin, message):
    with pytest.raises(ValueError, match=message):
        plugins.load(plugin)


def test_a_kind_that_lacks_a_method_or_has_a_taken_name_is_refused():
    class Half(Recurrent):
        def parallel(self, layer, q, k, v, *, lengths=None, training=False):
            return v

    with pytest.raises(ValueError, match="attention 'half': Half must define state_shapes, step"):
        register_attention("half")(Half)
    with pytest.raises(ValueError, match="must be a subclass of Attention or Recurrent"):
        register_attention("half")(dict)

    class Values(Attention):
        def parallel(self, layer, q, k, v, *, lengths=None, training=False):
            return v

    for taken in ("softmax", "lsh-4"):
        with pytest.raises(ValueError, match=f"'{taken}' exists already"):
            register_attention(taken)(Values)
    with pytest.raises(ValueError, match="lower-case letters, digits and hyphens, got 'My kind'"):
        register_attention("My kind")(Values)
    register_attention("values")(Values)
    assert Values.steps_as == ""  # it is trained, and draws nothing


def test_a_step_of_another_shape_is_refused_by_name():
    @register_attention("flat")
    class Flat(Recurrent):
        @property
        def state_shapes(self):
            return {"S": (2, 8)}

        def parallel(self, layer, q, k, v, *, lengths=None, training=False):
            return v

        def step(self, layer, q, k, v, memory):
            return v.flatten(1)

    net = perturbed_net(dataclasses.replace(TINY, attention="flat"))
    state = net.attention.new_state(1)
    with pytest.raises(ValueError, match=r"step of Flat must return .* \(1, 2, 8\), got \(1, 16\)"):
        net.step(
            torch.zeros(1, 64, dtype=torch.uint8),
            torch.tensor([0]),
            torch.tensor([256]),
            state,
            torch.tensor([1]),
        )
