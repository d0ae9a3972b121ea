"""Phases of load: each is a coroutine over a Soak, which ends with one result or several."""

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

from PIL import Image

from tests.fuzz.pictures import encode
from tests.soak.checks import measured
from tests.soak.endings import drain, faults, kill, reload
from tests.soak.loads import (
    RAMP,
    STREAMS,
    Result,
    Soak,
    arrivals,
    closed_loop,
    gather,
    images_per_second,
    one_of_many,
)
from tests.soak.service import Oracle, Service
from tools.harness.client import Ask, Picture, Record

# of their pictures: larger ones leave more of the heap in use than the phases allow
LARGEST_SIDE = 1024
# of the largest size, and noise: some 400 kB, and the buffers between take 170 kB
UNREAD_EVENTS = 110
KEPT = 0.90  # of the throughput at few clients, or of capacity under overload
# under overload of a model so small that HTTP and refusals share the cores with it; was 0.12 once
KEPT_SMALL = 0.60
ALONE = 64  # different images of the model that is all arithmetic: each is drawn alone once


async def crowds(soak: Soak) -> list[Result]:
    """Closed loops of more and more clients."""
    service, oracle = await soak.crowded()
    results = []
    for clients in soak.plan.clients:
        async with measured(
            soak, f"{clients:,} client{'s' * (clients > 1)}", service, [oracle]
        ) as (result, records):
            records += await closed_loop(soak, service, clients)
        results.append(result)
    return results


async def batching(soak: Soak) -> list[Result]:
    """Throughput of few clients and of many, in turn, of a model that is all arithmetic."""
    few, many = soak.plan.few_and_many
    service, oracle = await soak.crowded(soak.plan.batching, many)
    rates: dict[int, list[float]] = {few: [], many: []}
    results = []
    for clients in [few, many] * soak.plan.rounds:
        name = f"{soak.plan.batching.name}, {clients} clients"
        async with measured(soak, name, service, [oracle]) as (result, records):
            records += await decoded(soak, service, oracle, clients, result)
        assert result.rate is not None
        rates[clients].append(result.rate)
        results.append(result)
    ratio = statistics.median(rates[many]) / statistics.median(rates[few])
    results[-1].notes.append(
        f"images/s, by sub-pixels, at {many} clients over {few}, medians of {soak.plan.rounds}: "
        f"{ratio:.2f}"
    )
    if ratio < KEPT:
        results[-1].missed.append(
            f"throughput at {many} clients is {ratio:.2f} of that at {few}, not {KEPT} or more"
        )
    return results


async def decoded(
    soak: Soak,
    service: Service,
    oracle: Oracle,
    clients: int,
    result: Result,
    streams: float = 0.0,
    begin_s: float = 0.0,
) -> list[Record]:
    """A closed loop. Its rate is by sub-pixels: many images of one batch end together, a few times
    in a stretch.
    """

    async def count() -> tuple[float, float]:
        return time.monotonic(), sum(
            value
            for name, value in service.samples().items()
            if name.startswith("linpix_pixels_generated_total")
        )

    async def rate() -> float:
        await asyncio.sleep(RAMP * soak.plan.seconds)
        began, before = await count()
        await asyncio.sleep((1 - RAMP) * soak.plan.seconds)
        ended, after = await count()
        return (after - before) / oracle.config.subpixels / (ended - began)

    loop = closed_loop(
        soak,
        service,
        clients,
        lambda: Ask(soak.random.randrange(ALONE), stream=soak.random.random() < streams),
        begin_s=begin_s,
    )
    records, result.rate = await asyncio.gather(loop, rate())
    return records


async def poisson(soak: Soak) -> list[Result]:
    """Open arrivals under, near and over capacity, with the queue that is the default."""
    plan = soak.plan
    crowd = min(128, max(plan.clients))  # keeps every slot busy, and somebody waiting
    service, oracle = await soak.service(plan.model, clients=2 * crowd)
    results = []

    async def capacity() -> float:
        async with measured(soak, f"capacity, {crowd} clients", service, [oracle]) as (
            result,
            records,
        ):
            records += await closed_loop(
                soak,
                service,
                crowd,
                lambda: soak.draw(stream=soak.random.random() < STREAMS),
                begin_s=RAMP * plan.seconds,
            )
        results.append(result)
        return result.rate or 1.0

    known = await capacity()
    for share in plan.rates:
        async with measured(soak, f"arrivals at {share:g} of capacity", service, [oracle]) as (
            result,
            records,
        ):
            began = time.monotonic()
            records += await arrivals(soak, service, share * known, plan.seconds, plan.seeds)
            result.goodput = images_per_second(records, began, plan.seconds, plan.slo_s)
        results.append(result)
        if share > 1:
            # before and after: the machine may have other work
            mean = (known + await capacity()) / 2
            kept = result.goodput / mean
            result.notes.append(f"goodput is {kept:.2f} of capacity, {mean:.0f} requests/s")
            if kept < KEPT_SMALL:
                result.missed.append(
                    f"goodput at {share:g} is {kept:.2f} of capacity, not {KEPT_SMALL}"
                )
    return results


async def overload(soak: Soak) -> list[Result]:
    """More than capacity, of a model that is all arithmetic: what is refused costs next to nothing
    beside it.

    Of a small model, HTTP takes a part of the cores, and each refusal takes some of what images
    would have had.
    """
    plan = soak.plan
    share, seconds, few = max(plan.rates), 2 * plan.seconds, plan.few_and_many[0]
    service, oracle = await soak.service(plan.batching, f"--slots {few}", clients=2 * few)
    results, goodputs, capacities = [], [], []

    async def capacity() -> None:
        name = f"capacity, {plan.batching.name}, {few} slots, {2 * few} clients"
        async with measured(soak, name, service, [oracle]) as (result, records):
            records += await decoded(
                soak, service, oracle, 2 * few, result, STREAMS, RAMP * plan.seconds
            )
        results.append(result)
        capacities.append(result.rate or 1.0)

    await capacity()
    for _ in range(plan.rounds):
        name = f"{plan.batching.name}, arrivals at {share:g} of capacity"
        async with measured(soak, name, service, [oracle]) as (result, records):
            began = time.monotonic()
            records += await arrivals(soak, service, share * capacities[-1], seconds, ALONE)
            result.rate = images_per_second(records, began, seconds)
            result.goodput = images_per_second(records, began, seconds, plan.slo_s)
        results.append(result)
        goodputs.append(result.goodput)
        await capacity()
    # the machine may have other work
    around = [(before + after) / 2 for before, after in pairwise(capacities)]
    kept = statistics.median(good / of for good, of in zip(goodputs, around, strict=True))
    results[-2].notes.append(f"goodput over capacity, median of {plan.rounds}: {kept:.2f}")
    if kept < KEPT:
        results[-2].missed.append(f"goodput at {share:g} is {kept:.2f} of capacity, not {KEPT}")
    return results


async def leavers(soak: Soak) -> list[Result]:
    """A storm: everybody comes at once, and half leave at random moments."""
    service, oracle = await soak.crowded()
    async with measured(soak, f"{soak.plan.storm:,} clients, half leave", service, [oracle]) as (
        result,
        records,
    ):
        records += await gather(
            soak,
            (
                one_of_many(
                    service,
                    soak.draw(stream=index % 8 < 2),
                    soak.random.uniform(0, soak.plan.seconds / 3) if index % 2 else None,
                )
                for index in range(soak.plan.storm)
            ),
        )
    result.rate = None
    if not result.outcomes["left"]:
        result.failures.append("nobody left in time: the storm was none")
    return [result]


async def slow(soak: Soak) -> list[Result]:
    """Clients that stop in the middle of reading or writing, beside others who do not."""
    service, oracle = await soak.crowded()
    largest = [size for size in service.card["sizes"] if int(size.split("x")[0]) <= LARGEST_SIDE][
        -1
    ]
    count = soak.plan.slow
    n = max(1, UNREAD_EVENTS // service.card["height"])
    go = asyncio.Event()
    async with measured(
        soak, f"{count} slow readers, {count} slow writers, 16 others", service, [oracle]
    ) as (result, records):
        readers = [
            asyncio.ensure_future(
                service.connection(hold=go, slow="reading").ask(
                    soak.draw(n=n, size=largest, stream=True, temperature=10.0)
                )
            )
            for _ in range(count)
        ]
        writers = [
            asyncio.ensure_future(
                service.connection(hold=go, slow="writing").ask(
                    soak.draw(), leave_after=soak.plan.seconds / 2 if index % 2 else None
                )
            )
            for index in range(count)
        ]
        records += await closed_loop(soak, service, 16)
        for _ in range(100):  # the slow readers' images are decoded all the same
            held = {name: value for name, value in service.gauges().items() if "slots_used" in name}
            if not any(held.values()):
                break
            await asyncio.sleep(0.1)
        else:
            result.failures.append(f"while clients do not read, {held}")
        if not service.samples()["linpix_requests_running"]:
            result.failures.append("no answer was left unread: the readers were not slow")
        go.set()
        records += await gather(soak, [*readers, *writers])
    return [result]


def occluded_pictures(oracle: Oracle) -> list[Picture]:
    """Images of the model's own, enlarged or not, with holes of every kind."""
    config, found = oracle.config, []
    for index, factor in enumerate((1, 2, 3, 7, 20)):
        pixels = oracle.canvas(index).reshape(config.height, config.width, config.channels)
        image = Image.fromarray(pixels[..., 0] if config.channels == 1 else pixels)
        image = image.resize(
            (config.width * factor, config.height * factor + index), Image.Resampling.BICUBIC
        )
        holes = Image.new("L", image.size, 255)
        holes.paste(0, (image.width // 3, image.height // 4, image.width, image.height // 2))
        transparent = image.convert("RGBA")
        transparent.putalpha(holes)
        found += [
            Picture(encode(image), keep_rows=config.height // 2),
            Picture(encode(transparent)),
            Picture(encode(image), mask=encode(transparent)),
            Picture(encode(image), keep_rows=0),
            Picture(encode(image), keep_rows=config.height - 1),
        ]
    return found


async def completions(soak: Soak) -> list[Result]:
    """Pictures of many sizes, with much or little to fill in, once or several times, streamed or
    not.
    """
    service, oracle = await soak.crowded()
    given = occluded_pictures(oracle)
    sizes = service.card["sizes"][:3]

    def make() -> Ask:
        choose = soak.random
        return Ask(
            choose.randrange(4),
            n=choose.choice((1, 1, 2, 4)),
            size=choose.choice(sizes),
            stream=choose.random() < 0.1,
            picture=choose.choice(given),
        )

    async with measured(soak, "completions of mixed sizes, 32 clients", service, [oracle]) as (
        result,
        records,
    ):
        records += await closed_loop(soak, service, 32, make)
    return [result]


# and its stretches
PHASES: dict[str, tuple[Callable[[Soak], Coroutine[Any, Any, list[Result]]], int]] = {
    "crowds": (crowds, 5),
    "poisson": (poisson, 5),
    "leavers": (leavers, 1),
    "slow": (slow, 1),
    "completions": (completions, 1),
    "reload": (reload, 1),
    "faults": (faults, 1),
    "drain": (drain, 1),
    "kill": (kill, 1),
    "batching": (batching, 6),
    "overload": (overload, 10),
}
