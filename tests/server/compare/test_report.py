"""Reports of comparisons: the chart, the table and the files."""

import json
import sys
from xml.etree import ElementTree

import pytest

from linpix.server.compare.chart import svg, write
from linpix.server.compare.report import PAPER, markdown, table

SVG = "{http://www.w3.org/2000/svg}"


def result(backend: str, batch: int, seconds: float, **changes) -> dict:
    steps = [
        {"position": t, "seconds": seconds / 784 * (1 + t / 784)} for t in (0, 196, 392, 588, 783)
    ]
    return {
        "backend": backend,
        "engine": "eager",
        "weights": None,
        "batch": batch,
        "images_per_second": batch / seconds,
        "seconds_per_image": seconds,
        "state_bytes": 67584,
        "step_seconds": steps,
        "tail_over_head": 1.9,
        "estimated": False,
        "positions": None,
        "bits_per_dim": 0.912,
        "exception": None,
        "note": None,
    } | changes


@pytest.fixture
def report() -> dict:
    nothing = {
        "images_per_second": None,
        "seconds_per_image": None,
        "step_seconds": [],
        "tail_over_head": None,
        "estimated": True,
    }
    return {
        "model": "mnist-<small> & co",
        "digest": "d" * 64,
        "attention": "linear",
        "twins": [],
        "subpixels": 784,
        "tokens": 784,
        "layers": 4,
        "d_model": 128,
        "budget_s": 60.0,
        "spent_s": 58.0,
        "created": "2026-11-20T12:00:00+00:00",
        "machine": {
            "cpu": "Some CPU",
            "cores": 2,
            "threads": 2,
            "torch": "2.13",
            "platform": "Linux",
            "load": 0.1,
        },
        "commit": "1a2b3c4",
        "command": "linpix compare --model mnist-small",
        "paper": PAPER,
        "largest_logit_difference": 4.8e-7,
        "notes": ["No figure for softmax at batch 64: no time."],
        "results": [
            result("linear", 1, 0.6),
            result("stateful-softmax", 1, 0.7),
            result("softmax", 1, 5.0),
            result("linear", 64, 4.0),
            result("stateful-softmax", 64, 8.0, estimated=True),
            result("softmax", 64, 1.0, bits_per_dim=None, **nothing),
        ],
    }


def test_three_files_are_written_and_nothing_else(report, tmp_path):
    out = tmp_path / "out"
    write(report, out)
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "report.md", "report.svg"]
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))


def test_an_earlier_report_survives_one_that_cannot_be_written(report, tmp_path):
    write(report, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError):
        write(report | {"budget_s": float("nan")}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def words(report: dict) -> list[str]:
    """The texts of the chart, from its first to its last."""
    return [
        "".join(element.itertext())
        for element in ElementTree.fromstring(svg(report)).iter(f"{SVG}text")
    ]


def test_the_chart_says_what_it_shows(report):
    text = " ".join(words(report))
    for word in (
        "mnist-<small> & co",
        "images/s, B = 1",
        "images/s, B = 64",
        "images/s, paper, MNIST",
        "P40-class GPU",
        "time of a step at B = 64",
        "10 ms",
        "Some CPU",
    ):
        assert word in text
    # rows of bars; and the legend of lines, where softmax has no figure at the largest batch
    assert {
        name: words(report).count(name) for name in ("linear", "stateful-softmax", "softmax")
    } == {"linear": 2, "stateful-softmax": 2, "softmax": 1}


def test_without_matplotlib_the_report_has_no_chart_and_says_how_to_get_it(
    report, tmp_path, monkeypatch
):
    write(report, tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(report, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    assert "pip install '.[train]'" in (tmp_path / "report.md").read_text()


def test_an_estimate_is_marked_wherever_it_stands(report):
    assert "~8.00" in markdown(report) and "~8.00" in table(report) and "~8" in svg(report)
    assert "~16.0" not in markdown(report)


def test_lsh_has_its_lines_beside_the_papers_and_its_bits_per_dim_a_star(report):
    reason = "Sorting by hash looks at later sub-pixels too"
    report["results"] += [
        result("lsh-1", 1, 10.0, bits_per_dim=1.23, exception=reason, estimated=True),
        result("lsh-4", 1, 20.0, bits_per_dim=None, exception=reason),
    ]
    throughput, alone = markdown(report).split("## ")[1:3]
    assert "tables 1 and 4" in throughput
    assert "| lsh-1 | 1.23* | ~0.100 (0.500x) | - | 0.745 | 0.68 (1.51x) |" in throughput
    assert "| lsh-4 | - | 0.0500 (0.250x) | - | 0.676 | 0.27 (0.600x) |" in throughput
    assert "| lsh-1 | ~10.0 (16.7x) | 46 (8.36x) | 19.2 (2.63x) |" in alone
    assert (
        "| linear | 0.912 |" in throughput
        and "1.23*" in table(report)
        and "0.912*" not in table(report)
    )
    assert {"lsh-1", "lsh-4"} <= set(words(report))


def test_the_report_states_its_circumstances(report):
    text = markdown(report)
    for fact in (
        "Some CPU",
        "2 threads",
        "torch 2.13",
        "1a2b3c4",
        "linpix compare --model mnist-small",
        "4.8e-07",
        "No figure for softmax at batch 64",
    ):
        assert fact in text


def test_the_table_has_a_line_for_every_result(report):
    lines = table(report).splitlines()
    assert [line.split()[:3] for line in lines[1:7]] == [
        [one["backend"], "torch", str(one["batch"])] for one in report["results"]
    ]
    assert len({len(line) for line in lines[:7]}) == 1


@pytest.mark.parametrize("form", [markdown, svg, table])
def test_a_report_without_any_figure_can_be_shown(report, form):
    for one in report["results"]:
        one.update(
            images_per_second=None, seconds_per_image=None, step_seconds=[], tail_over_head=None
        )
    assert form(report)


def test_a_factor_is_formed_between_rows_of_the_same_engine_only(report):
    report["results"] += [
        result("linear", 1, 0.01, engine="compiled"),
        result("linear", 64, 0.2, engine="eager+operator"),
    ]
    throughput, alone = markdown(report).split("## ")[1:3]
    assert "| linear (torch) | 0.912 | 1.67 (8.33x) |" in throughput
    assert "| linear (compiled) | 0.912 | 100 | - |" in throughput
    assert "| linear (torch with our operator) | - | - | 320 |" in throughput
    assert (
        "| linear (compiled) | 0.0100 (1.00x) |" in alone
        and "| softmax (torch) | 5.00 (8.33x) |" in alone
    )


def test_a_row_that_other_work_disturbed_says_so_itself_compiled_ones_too(report):
    why = "other work used its processor for 40% of the time"
    report["results"] += [result("linear", 1, 0.01, engine="compiled", disturbed=True, note=why)]
    compiled = [
        line for line in markdown(report).splitlines() if line.startswith("| linear (compiled)")
    ]
    assert "100†" in compiled[0] and "0.0100† (1.00x)" in compiled[1]
    assert "0.600†" not in markdown(report)
    assert (
        "100†" in table(report)
        and "100†" in svg(report)
        and "†: disturbed by other work" in svg(report)
    )


@pytest.mark.parametrize("busy", ["linear", "softmax"])
def test_a_factor_with_a_row_that_other_work_disturbed_is_given_and_the_row_is_marked(report, busy):
    for one in report["results"]:
        one["disturbed"] = one["backend"] == busy
    throughput, alone = markdown(report).split("## ")[1:3]
    dagger = {name: "†" if name == busy else "" for name in ("linear", "softmax")}
    assert f"| linear | 0.912 | 1.67{dagger['linear']} (8.33x) |" in throughput
    assert f"| softmax | 5.00{dagger['softmax']} (8.33x) |" in alone


def test_cifar_stands_beside_the_papers_cifar(report):
    text = markdown(report | {"subpixels": 3072})
    assert "17.85" in text and "tables 2 and 4" in text
    assert "images/s, paper, CIFAR-10" in words(report | {"subpixels": 3072})
