"""Batches are functions of their number, whoever makes them."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linpix.model.config import PRESETS
from linpix.model.inputs import START
from linpix.training import batches as batches_module
from linpix.training import loop
from linpix.training.batches import Batches, Parts, makers, part_of, readings
from linpix.training.run import Run, TrainConfig
from linpix.training.workers import Workers
from tools.harness.servers import eventually

TINY = PRESETS["tiny"]
CONDITIONAL = replace(TINY, look_ups=("previous", "row", "column", "class"), patch=4)
SETTINGS = TrainConfig(batch=8)


def tensors(given: object) -> list[Tensor]:
    """All tensors of a part."""
    if isinstance(given, Tensor):
        return [given]
    return [*chain.from_iterable(map(tensors, given or ()))]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("config", [TINY, CONDITIONAL], ids=["plain", "conditional"])
def test_parts_made_ahead_are_those_of_their_numbers_in_order(stripes, config, processes):
    settings = replace(SETTINGS, accumulate=2, readings=2 * (config.patch > 0))
    net = Run(config, settings).net
    parts = Parts(Batches(stripes, settings, config), net, Workers(1, 2))
    for number, made in enumerate(islice(parts.since(20, processes), 15), 20):
        images, start, known = Batches(stripes, settings, config)[number]
        again = readings(settings, config, number)
        for at, part in zip((1, 3), made, strict=True):
            given = (None if each is None else each[at::4] for each in (known, again))
            expected = part_of(net, images[at::4], start[at::4], *given)
            assert len(tensors(part)) == len(tensors(expected)) == (36 if config.patch else 2)
            assert all(map(torch.equal, tensors(part), tensors(expected)))


@pytest.mark.parametrize("config", [TINY, CONDITIONAL], ids=["plain", "conditional"])
def test_processes_that_make_batches_do_not_touch_a_gpu(stripes, monkeypatch, config):
    """They are forked, and a GPU that was used before cannot be used in them."""

    def used() -> None:
        raise RuntimeError("a GPU was used")

    monkeypatch.setattr(torch.cuda, "_lazy_init", used)
    with pytest.raises(RuntimeError, match="a GPU was used"):
        torch.cuda.current_device()
    batches = Batches(stripes, replace(SETTINGS, augment="flip"), config)
    assert len([*islice(Parts(batches, Run(config, SETTINGS).net, Workers()).since(0, 2), 4)]) == 4


def test_parts_are_made_on_the_processor_whatever_the_device_of_new_tensors_is(stripes):
    net = Run(CONDITIONAL, SETTINGS).net
    with torch.device("meta"):
        [part] = Parts(Batches(stripes, SETTINGS, CONDITIONAL), net, Workers())[0]
    assert {str(each.device) for each in tensors(part)} == {"cpu"}


@pytest.mark.parametrize("config", [TINY, CONDITIONAL], ids=["plain", "conditional"])
def test_a_step_reads_no_tensor_for_which_it_would_wait_on_a_gpu(stripes, monkeypatch, config):
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._schema.name in (
                "aten::_local_scalar_dense",
                "aten::nonzero",
                "aten::equal",
            ):
                read.append((run.step, function._schema.name))
            return function(*args, **kwargs or {})

    read, readings = [], 2 * (config.patch > 0)
    made = replace(SETTINGS, readings=readings, dropout=0.1, compile=False)
    monkeypatch.setattr(loop, "makers", lambda device, sharing: 1)
    run = Run(config, made)
    with Reads():
        coming = loop.parts_of(run, stripes, Workers())
        loss_of = loop.loss_function(run.net, run.config)
        for _ in loop.steps(
            run, coming, loss_of, Workers(), lambda: (0.0, run.step > loop.CHECKED)
        ):
            pass
    assert run.step == loop.CHECKED + 2 and {step for step, _ in read} == {0, loop.CHECKED}, read


@pytest.mark.slow
def test_a_signal_to_training_and_its_makers_alike_ends_it_after_a_save(pictures, tmp_path):
    """As torchrun and service managers send it. Batches are made ahead as for a GPU."""
    script = (
        "import sys; from linpix.__main__ import main; from linpix.training import loop; "
        "loop.makers = lambda device, sharing: 2; sys.exit(main(sys.argv[1:]))"
    )
    files = f"--data {pictures} --out {tmp_path}/run"
    long = "--images 1000000 --batch 8 --no-compile --device cpu --processes 1"
    train = f"train tiny {files} {long}".split()
    with subprocess.Popen(
        [sys.executable, "-c", script, *train],
        start_new_session=True,
        text=True,
        stderr=subprocess.PIPE,
    ) as training:
        log = tmp_path / "run.training/log.csv"
        try:
            assert eventually(lambda: log.exists() and len(log.read_text().splitlines()) > 1)
            os.killpg(training.pid, signal.SIGTERM)
            _, said = training.communicate()
        finally:
            training.kill()  # else one that goes on would be waited for without end
    assert training.returncode == 0, said
    assert "Traceback" not in said
    assert (tmp_path / "run.training/state.pt").exists()


def test_only_a_gpu_has_processes_that_make_its_batches_and_they_leave_it_a_core(monkeypatch):
    monkeypatch.setattr(batches_module, "usable_cores", lambda: 6)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [makers(cpu, 1), makers(gpu, 1), makers(gpu, 2), makers(gpu, 6)] == [0, 5, 2, 0]
    monkeypatch.setattr(batches_module, "usable_cores", lambda: 96)
    assert makers(gpu, 1) == batches_module.MAX_MAKERS


def test_a_resumed_conditional_run_sees_the_same_masks(stripes):
    batches, again = (Batches(stripes, SETTINGS, CONDITIONAL) for _ in range(2))
    images, start, known = batches[7]
    again[3]
    found = again[7]
    assert all(map(torch.equal, (images, start, known), found))
    drawn = [batches[number] for number in range(200)]
    told = torch.cat([known.any(1) for _, _, known in drawn])
    assert 0.6 < float(told.float().mean()) < 0.72
    # it draws the class first
    assert not any(bool((start == START).any()) for _, start, _ in drawn)


def test_a_batch_is_a_function_of_its_number_and_an_epoch_uses_each_image_once(stripes):
    batches, again = Batches(stripes, SETTINGS, TINY), Batches(stripes, SETTINGS, TINY)
    later = again[30]
    for number in range(30):
        batches[number]
    assert all(map(torch.equal, batches[30][:2], later[:2]))
    seen = [batches._at(number, 100) for number in range(100, 200)]
    assert sorted(seen) == list(range(100))


def test_half_of_the_images_begin_with_the_unconditional_start_and_the_others_with_their_class(
    stripes,
):
    batches = Batches(stripes, SETTINGS, TINY)
    starts = torch.cat([batches[number][1] for number in range(200)])
    assert 0.45 < (starts == 256).float().mean() < 0.55
    images, start, _ = batches[0]
    heights = images.view(-1, 8, 8)[:, :, 0].bool().sum(1)
    labelled = start != 256
    assert torch.equal(start[labelled] - 257, heights[labelled])


def test_an_unlabelled_data_set_trains_unconditionally(stripes):
    unlabelled = replace(stripes, labels=np.full(100, -1), classes=())
    assert set(Batches(unlabelled, SETTINGS, TINY)[0][1].tolist()) == {256}
