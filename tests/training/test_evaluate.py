import pytest
import torch

from model import checkpoint, ops
from model.packing import PRECISIONS, pack
from training.datasets import load
from training.evaluate import bits_of, stepped_bits_of


@pytest.mark.skipif(not ops.compiled, reason=ops.why())
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 5e-3)])
def test_the_compiled_engine_gives_the_shipped_model_its_bits_per_dim(data, precision, bound):
    """Against float64 by the parallel form, on the first 48 test images: each image, and more so their mean."""
    net = checkpoint.read(checkpoint.find("mnist-small")).net
    images = load(data / "mnist", "test", net.config).images[:48]
    stepped = stepped_bits_of(net, pack(net, PRECISIONS[precision]), images)
    exact = bits_of(net.double(), images)
    assert stepped.shape == exact.shape == (48,)
    assert float((stepped - exact).abs().max()) < 3 * bound
    assert float((stepped.mean() - exact.mean()).abs()) < bound
    assert stepped.dtype == torch.float64
