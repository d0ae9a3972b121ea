"""The service under load: a server process, its counters, its resources, and the images that it
should draw.
"""

import asyncio
import base64
import functools
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from prometheus_client.parser import text_string_to_metric_families

from linpix.cli.draw import produce
from linpix.model import checkpoint
from linpix.server.engine.decode.choice import new_decoder
from linpix.server.engine.decode.engine import Engine
from linpix.server.engine.job import Job
from linpix.server.pictures import encode, uploads
from tools.harness.client import Connection, Picture, Record
from tools.harness.servers import Process, eventually

# gauges that need not be 0 when nothing runs
CONSTANT = ("linpix_state_slots", "linpix_comparison_images_per_second")
SETTLE_S = 120.0  # for the last slots, connections and buffers to be given back


class Service:
    """One server process of one model, and how it was after it had warmed up."""

    def __init__(self, model: Path, *flags: str) -> None:
        began = time.monotonic()
        self.process = Process(model.parent, f"--models {model.name}", *flags)
        address = urlsplit(self.process.url)
        self.host, self.port = str(address.hostname), int(address.port or 0)
        self.await_ready()
        self.ready_s = time.monotonic() - began
        self.pid = self.process.process.pid
        [self.card] = self.process.get("/v1/models").json()["data"]
        self.memory_warm = self.files_warm = 0

    def await_ready(self) -> None:
        if not eventually(lambda: self.process.get("/readyz").status_code == 200):
            self.process.stop()
            raise RuntimeError("it is not ready")

    def connection(self, **how) -> Connection:
        return Connection(self.host, self.port, **how)

    def digest(self) -> str:
        """Of the checkpoint that is served now."""
        [card] = self.process.get("/v1/models").json()["data"]
        return str(card["checkpoint"])

    def samples(self) -> dict[str, float]:
        """Every counter and histogram sample of /metrics, by name and labels as they are written
        there.
        """
        lines = self.process.get("/metrics").text.splitlines()
        return {
            name: float(value)
            for name, _, value in (
                line.rpartition(" ") for line in lines if line.startswith("linpix_")
            )
        }

    def gauges(self) -> dict[str, float]:
        """What should be 0 when nothing runs."""
        families = text_string_to_metric_families(self.process.get("/metrics").text)
        return {
            f"{sample.name}{sample.labels or ''}": sample.value
            for family in families
            if family.type == "gauge"
            and family.name.startswith("linpix_")
            and family.name not in CONSTANT
            and not family.name.endswith("_info")
            for sample in family.samples
        }

    @property
    def memory(self) -> int:
        """Resident, in bytes."""
        return int(self._status("VmRSS").split()[0]) * 1024

    @property
    def files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def catches(self, number: int) -> bool:
        """Whether the process has a handler for this signal; else it may end at it."""
        return bool(int(self._status("SigCgt"), 16) >> (number - 1) & 1)

    def _status(self, name: str) -> str:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return dict(line.split(":", 1) for line in lines)[name].strip()

    async def settle(self) -> list[str]:
        """Wait until all is given back. Returns what was not."""
        end = time.monotonic() + SETTLE_S
        while True:
            held = [f"{name} is {value:g}, not 0" for name, value in self.gauges().items() if value]
            if self.files_warm and self.files > self.files_warm:
                held.append(f"{self.files} files are open, {self.files_warm} when it was warm")
            if not held or time.monotonic() > end:
                return held
            await asyncio.sleep(0.05)

    async def is_warm(self) -> None:
        """What it holds now is what it should hold after whatever comes. Raises RuntimeError if it
        still has work.
        """
        if held := await self.settle():
            raise RuntimeError(f"after warming up, {'; '.join(held)}")
        await asyncio.sleep(0.3)  # for the connections that asked
        self.memory_warm, self.files_warm = self.memory, self.files


class Oracle:
    """What each request's images are when nobody else has any: the same engine in this process,
    with one slot.
    """

    def __init__(self, model: Path, card: dict) -> None:
        """card: the model as /v1/models tells of it."""
        # the eager engine rounds otherwise in another batch
        self.promised = card["engine"] == "compiled"
        loaded = checkpoint.read(model)
        self.digest, self.config = loaded.digest, loaded.net.config
        self._engine = Engine(
            new_decoder(loaded, 1, card["engine"], card["precision"], device=card["device"])
        )
        self.canvas, self.png = functools.cache(self._canvas), functools.cache(self._png)

    def _canvas(self, seed: int, picture: Picture | None = None, temperature: float = 1.0):
        given: dict[str, Any] = {}
        if picture is not None:
            upload = uploads.read(
                picture.image, self.config, mask=picture.mask, keep_rows=picture.keep_rows
            )
            given = {"canvas": upload.canvas, "known": upload.known}
        threads = torch.get_num_threads()
        # two meet at barriers in every step, which take long on a busy machine
        torch.set_num_threads(1)
        try:
            [image], _ = produce(self._engine, Job(seed=seed, temperature=temperature, **given))
        finally:
            torch.set_num_threads(threads)
        return image.canvas

    def _png(self, seed: int, picture: Picture | None, temperature: float, size: str) -> str:
        """The base64 of an image of its own, as an answer has it."""
        canvas = self.canvas(seed, picture, temperature)
        png = encode.png(canvas, self.config, encode.frame_of(size, self.config).factor)
        return base64.b64encode(png).decode()

    def wrong(self, record: Record) -> list[int]:
        """Seeds of a request's images that are not what their seed gives alone."""
        ask = record.ask
        return [
            seed
            for _, seed, png in record.images
            if png != self.png(seed, ask.picture, ask.temperature, ask.size)
        ]
