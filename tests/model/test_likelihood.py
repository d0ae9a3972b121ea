"""Likelihoods computed in pieces equal the parallel form over whole images, and are true
probabilities.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from linpix.model import checkpoint, likelihood, mixture
from linpix.model.config import PRESETS, bits_per_dim
from linpix.model.inputs import START
from linpix.model.likelihood import Scoring, class_log_probs_of, mixture_of, posterior
from linpix.model.nets import net_for
from linpix.model.transformer import Transformer
from linpix.training.datasets import load
from linpix.training.evaluate import bits_of
from tests.fuzz.pictures import noise
from tests.nets import CONDITIONAL, perturbed_net

TINY = PRESETS["tiny"]
MARGINAL = np.random.default_rng(1).random(256)
PIXELS = dataclasses.replace(
    TINY, channels=3, tokens="pixel", neighbours=((0, -1, 1), (-1, 0, 0), (-1, 1, 2))
)
CONFIGS = {
    "linear": TINY,
    "colour": dataclasses.replace(TINY, channels=3),
    "softmax": dataclasses.replace(TINY, attention="softmax"),
    "lsh": dataclasses.replace(TINY, attention="lsh"),
    "reversible": dataclasses.replace(TINY, residual="reversible", norm="pre"),
    "marginal": dataclasses.replace(
        TINY, classes=0, first_marginal=tuple((MARGINAL / MARGINAL.sum()).tolist())
    ),
    "background": dataclasses.replace(TINY, background=0, background_dim=16),
    "conditional": CONDITIONAL,
    "pixels": PIXELS,
    "pixels, lsh": dataclasses.replace(PIXELS, attention="lsh"),
    "pixels, conditional": dataclasses.replace(
        PIXELS,
        patch=4,
        following=((0, 1, 2), (1, 0, 1)),
        look_ups=("previous", "row", "column", "class"),
    ),
}
SCATTERED = np.random.default_rng(2).random(64) < 0.5


def totals(scoring: Scoring) -> np.ndarray:
    """(labels,): log-likelihoods of the hidden sub-pixels, in nats."""
    return scoring.log_probs[:, scoring.hidden].double().sum(1).numpy()


def picture_of(net: Transformer, *, dark: bool = False) -> np.ndarray:
    """dark: most of it skips the layers, where a model has a background."""
    picture = noise(net.config.subpixels)
    return (
        np.where(np.arange(len(picture)) % 13 == 5, picture, 0).astype(np.uint8)
        if dark
        else picture
    )


@pytest.fixture(params=[1.0, likelihood.PIECE], ids=["smallest pieces", "usual pieces"])
def pieces(request, monkeypatch):
    monkeypatch.setattr(likelihood, "PIECE", request.param)


@pytest.mark.parametrize("dark", [False, True], ids=["noise", "dark"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_image_has_the_bits_per_dim_of_evaluate(pieces, name, dark):
    net = perturbed_net(CONFIGS[name])
    picture = picture_of(net, dark=dark)
    scoring = Scoring(net, picture).complete()
    expected = float(bits_of(net, picture[None])[0])
    assert -bits_per_dim(scoring.mixed.sum(), net.config) == pytest.approx(expected, abs=1e-5)
    assert scoring.log_probs.shape == (10 if net.config.class_first else 1, net.config.subpixels)


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "softmax",
        "lsh",
        "reversible",
        "background",
        "conditional",
        "pixels",
        "pixels, conditional",
    ],
)
def test_classes_together_have_what_the_parallel_form_gives_each(pieces, name):
    net = perturbed_net(CONFIGS[name])
    picture, labels = picture_of(net), [None, *range(10)]
    together = Scoring(net, picture, labels=labels).complete()
    with torch.inference_mode():
        images = torch.from_numpy(picture).expand(11, -1)
        expected = mixture.log_likelihood(net(images, START + torch.arange(11)), images)
    torch.testing.assert_close(together.log_probs, expected, atol=1e-4, rtol=1e-5)
    assert len(set(totals(together))) == 11


@pytest.mark.parametrize("dark", [False, True], ids=["noise", "dark"])
@pytest.mark.parametrize("name", ["conditional", "pixels, conditional"])
def test_a_conditional_model_is_asked_given_all_that_is_known(pieces, name, dark):
    net = perturbed_net(CONFIGS[name])
    picture, known = picture_of(net, dark=dark), SCATTERED.repeat(net.config.token_size)
    scoring = Scoring(net, picture, known, [None, 3]).complete()
    images, told = torch.from_numpy(picture).expand(2, -1), torch.from_numpy(known).expand(2, -1)
    with torch.inference_mode():
        parameters = net.predict(
            net.sequences(images, torch.tensor([START, START + 4]), told)
        ).parameters
    expected = mixture.log_likelihood(parameters, images)
    assert torch.equal(scoring.log_probs.isnan(), told)
    torch.testing.assert_close(scoring.log_probs[~told], expected[~told], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("linear", 63),
        ("softmax", 63),
        ("marginal", 63),
        ("marginal", 0),
        ("background", 63),
        ("conditional", 63),
        ("conditional", 20),
        ("linear", 20),
    ],
)
def test_the_probabilities_of_all_values_of_one_hidden_sub_pixel_are_one(name, place):
    net = perturbed_net(CONFIGS[name])
    picture, known = picture_of(net), np.arange(64) != place
    totals = []
    for value in range(256):
        picture[place] = value
        totals.append(Scoring(net, picture, known).complete().mixed.sum())
    assert np.exp(totals).sum() == pytest.approx(1, abs=1e-4)


def test_without_a_class_a_conditional_model_expects_each_as_much_as_what_is_known_makes_it(pieces):
    net, known = perturbed_net(CONFIGS["conditional"]), SCATTERED
    net.class_head.weight.data *= 30
    picture = picture_of(net)
    images, told = torch.from_numpy(picture).expand(10, -1), torch.from_numpy(known).expand(10, -1)
    with torch.inference_mode():
        prediction = net.predict(net.sequences(images, START + 1 + torch.arange(10), told))
    likelihoods = mixture.log_likelihood(prediction.parameters, images)[:, ~known].double().sum(1)
    priors = prediction.class_scores.double().log_softmax(-1)[0]
    assert priors.max() - priors.min() > 1
    scoring = Scoring(net, picture, known).complete()
    assert scoring.mixed.sum() == pytest.approx(
        float((priors + likelihoods).logsumexp(0)), abs=1e-3
    )
    assert Scoring(net, picture).priors == pytest.approx(np.full(10, -math.log(10)))


@pytest.mark.parametrize("known", [None, SCATTERED], ids=["whole", "hidden part"])
def test_classes_that_the_class_head_excludes_are_left_out_of_a_lower_bound(pieces, known):
    net = perturbed_net(CONFIGS["conditional"])
    net.class_head.weight.data *= 30
    picture = picture_of(net)
    possible = class_log_probs_of(net, picture) >= math.log(likelihood.PLAUSIBLE)
    assert 1 < possible.sum() < 10
    exact = Scoring(net, picture, known).complete()
    bound = Scoring(net, picture, known, plausible=True).complete()
    assert totals(bound)[possible] == pytest.approx(totals(exact)[possible], abs=1e-3)
    assert np.isneginf(totals(bound)[~possible]).all()
    assert bound.mixed.sum() < exact.mixed.sum()


@pytest.mark.parametrize("name", ["linear", "conditional"])
def test_only_what_is_hidden_is_counted_and_nothing_after_it_is_computed(name):
    net = perturbed_net(CONFIGS[name])
    picture, known = picture_of(net), (np.arange(64) < 10) | (np.arange(64) > 20)
    scoring = Scoring(net, picture, known).complete()
    assert totals(scoring)[0] == pytest.approx(float(scoring.log_probs[0, 10:21].double().sum()))
    assert np.array_equal(scoring.log_probs[0].isnan().numpy(), known)
    if name == "linear":  # the same as in the whole image: what is known beside it does not matter
        whole = Scoring(net, picture).complete().log_probs[0, 10:21]
        torch.testing.assert_close(scoring.log_probs[0, 10:21], whole, atol=1e-4, rtol=1e-5)


def test_a_piece_has_a_bounded_number_of_classes_and_sub_pixels(monkeypatch):
    net, asked = perturbed_net(CONFIGS["linear"]), []
    own = net.parameters_between
    monkeypatch.setattr(
        net,
        "parameters_between",
        lambda canvas, begin, end, *rest: (
            asked.append((len(canvas), begin, end)) or own(canvas, begin, end, *rest)
        ),
    )
    monkeypatch.setattr(likelihood, "PIECE", 32 * 4 * net.multiplications)
    scoring, steps = Scoring(net, picture_of(net), labels=range(10)), 1
    while scoring.advance():
        steps += 1
    assert asked == [(4, 0, 32), (4, 32, 64), (4, 0, 32), (4, 32, 64), (2, 0, 32), (2, 32, 64)]
    assert steps == 6


def test_without_anything_hidden_there_is_no_likelihood():
    net = perturbed_net(CONFIGS["conditional"])
    with pytest.raises(ValueError, match="no sub-pixel is hidden"):
        Scoring(net, picture_of(net), np.ones(64, np.bool_))


def test_a_model_that_gives_nan_is_an_error():
    net = perturbed_net(CONFIGS["linear"])
    net.head.bias[0] = math.nan
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        Scoring(net, picture_of(net)).complete()


def test_a_first_sub_pixel_that_was_never_seen_is_impossible():
    config = dataclasses.replace(TINY, classes=0, first_marginal=(1.0,) + (0.0,) * 255)
    picture = np.full(64, 9, np.uint8)
    scoring = Scoring(net_for(config).eval(), picture).complete()
    assert totals(scoring)[0] == -math.inf and np.isfinite(scoring.log_probs[0, 1:].numpy()).all()


def test_the_posterior_is_the_share_of_each_class_in_the_sum():
    shares = posterior(np.log([0.1, 0.3, 0.4]) - 5000)
    assert shares == pytest.approx([0.125, 0.375, 0.5])
    assert shares.sum() == pytest.approx(1)


def test_a_mixture_of_classes_has_their_mean_likelihood_sub_pixel_by_sub_pixel():
    log_probs = -np.random.default_rng(0).random((10, 784)) * 3
    likelihoods, weights = log_probs.sum(1), np.arange(1, 11) / 55
    mixed, most = mixture_of(log_probs, np.log(weights)), likelihoods.max()
    assert mixed.sum() == pytest.approx(most + math.log(np.exp(likelihoods - most) @ weights))
    assert mixed[0] == pytest.approx(math.log(np.exp(log_probs[:, 0]) @ weights))
    assert mixture_of(log_probs[:1], np.zeros(1)) == pytest.approx(log_probs[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist-small", "mnist-conditional"])
def test_shipped_models_have_the_bits_per_dim_of_evaluate(data, name):
    net = checkpoint.named(name).net
    images = load(data / "mnist", "test", net.config).images[:12]
    found = [
        -bits_per_dim(Scoring(net, image).complete().mixed.sum(), net.config) for image in images
    ]
    assert np.abs(np.array(found) - bits_of(net, images).numpy()).max() < 1e-5
