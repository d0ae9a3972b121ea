"""What a run says while it trains, and its curve."""

import torch

from linpix.model.config import PRESETS
from linpix.training import log, plots
from linpix.training.evaluate import Evaluation
from linpix.training.progress import Progress
from linpix.training.run import Run, TrainConfig

TINY = PRESETS["tiny"]


def test_a_progress_line_has_images_bits_speed_and_time_left(capsys):
    run = Run(TINY, TrainConfig(images=1_600, batch=16, compile=False))
    progress = Progress(run, max_images=float("inf"), max_minutes=float("inf"))
    run.step, run.minutes = 50, 0.5
    progress._reported_at -= 61
    progress.step([torch.tensor(2.0), torch.tensor(1.0)])
    progress.step([torch.tensor(9.0)])
    progress.evaluated(Evaluation(1.25, 0.5, 30, 1.0), None, None)
    progress.close()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "training begins"
    assert told[1] == "800 images, 1.500 bits/dim in training, 26.7 images/s, 0.5 minutes left"
    assert told[2].startswith(
        "800 images, 1.250 +- 0.500 bits/dim on 30 pictures held out: too few pictures"
    )
    assert len(told) == 3, "once a minute"


def test_a_schedule_of_minutes_says_how_often_it_has_come_to_each_picture(capsys):
    run = Run(TINY, TrainConfig(minutes=5.0, batch=16, compile=False))
    progress = Progress(run, max_images=float("inf"), max_minutes=float("inf"))
    run.step = 10
    progress.ended(64)
    assert "this run saw each picture 2.5 times" in capsys.readouterr().err
    other = Progress(
        Run(TINY, TrainConfig(compile=False)), max_images=float("inf"), max_minutes=float("inf")
    )
    other.ended(64)
    assert capsys.readouterr().err == "training begins\n"


def test_without_matplotlib_a_run_says_how_to_get_its_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    run = Run(TINY, TrainConfig(compile=False))
    Progress(run, max_images=float("inf"), max_minutes=float("inf")).ended(64)
    assert (
        "curve.svg needs matplotlib, which is not installed; run: pip install '.[train]'"
        in capsys.readouterr().err
    )
    log.write_curve(tmp_path)
    assert not [*tmp_path.iterdir()]
