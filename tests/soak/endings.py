"""Phases that break, change or end a process under load, and therefore start their own."""

import asyncio
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from linpix.model import checkpoint
from linpix.model.nets import net_for
from tests.soak.checks import measured, otherwise, unanswered
from tests.soak.loads import Result, Soak, closed_loop, gather
from tests.soak.service import Oracle
from tools.harness.client import Record

READY_S = 5.0  # a restart takes less
RELOAD_S = 60.0  # other weights are listed sooner
CLOSING_S = 60.0  # after the drain: connections have 10 s, and the machine has other work


async def faults(soak: Soak) -> list[Result]:
    """A row throws in one of so many quanta: its request ends with an error, and no other."""
    every = soak.plan.fault_every
    clients = min(64, max(soak.plan.clients))
    with soak.doomed(f"--faults throw:every={every}") as service:
        await closed_loop(soak, service, clients, seconds=soak.plan.seconds / 4)
        await service.is_warm()
        async with measured(
            soak,
            f"a fault in 1 of {every} quanta, {clients} clients",
            service,
            [soak.oracle(soak.plan.model, service.card)],
        ) as (result, records):
            before = service.samples()
            records += await closed_loop(soak, service, clients)
            after = service.samples()
        struck = sum(
            value - before[name]
            for name, value in after.items()
            if name.startswith("linpix_faults_isolated")
        )
        codes = Counter(record.code for record in records if record.outcome == "failed")
        if codes != Counter(engine_failed=round(struck)) or not struck:
            result.failures.append(
                f"{struck:g} faults struck, and requests ended with {dict(codes)}"
            )
        result.notes.append(f"{struck:g} faults, as many requests failed")
    return [result]


async def reload(soak: Soak) -> list[Result]:
    """Other weights under the same name, and SIGHUP, while requests run: each image is of the ones
    or the others.
    """
    name, clients = "other weights by SIGHUP", min(64, max(soak.plan.clients))
    if not (await soak.crowded())[0].catches(signal.SIGHUP):
        return [
            Result(
                name,
                skipped=True,
                notes=["this service does not read its checkpoints again at SIGHUP"],
            )
        ]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / soak.plan.model.name
        shutil.copytree(soak.plan.model, model)
        with soak.doomed(model=model) as service:
            oracles = [Oracle(model, service.card)]
            await closed_loop(soak, service, clients, seconds=soak.plan.seconds / 4)
            await service.is_warm()
            async with measured(soak, f"{name}, {clients} clients", service, oracles) as (
                result,
                records,
            ):
                seen = asyncio.Event()
                working = asyncio.ensure_future(closed_loop(soak, service, clients, until=seen))
                await asyncio.sleep(soak.plan.seconds / 4)
                before = time.monotonic()
                try:
                    first, second = (
                        *oracles,
                        await asyncio.to_thread(other_weights, model, service.card),
                    )
                    oracles.append(second)
                    service.process.process.send_signal(signal.SIGHUP)
                    while (
                        (await asyncio.to_thread(service.digest)) != second.digest
                        and not working.done()
                        and time.monotonic() < before + RELOAD_S
                    ):
                        await asyncio.sleep(0.05)
                    switched = time.monotonic()
                    await asyncio.sleep(soak.plan.seconds / 4)
                finally:
                    seen.set()
                records += await working
                if not {first.digest, second.digest} <= {record.checkpoint for record in records}:
                    result.failures.append("not both checkpoints were served under load")
                if any(
                    record.checkpoint == first.digest
                    for record in records
                    if record.began > switched
                ):
                    result.failures.append(
                        "the old weights were used after the new ones were listed"
                    )
                result.notes.append(
                    f"the new weights were listed {switched - before:.1f} s after the signal"
                )
    return [result]


def other_weights(model: Path, card: dict) -> Oracle:
    """Put the same architecture, drawn anew, in place of a checkpoint; returns what it draws."""
    served = checkpoint.read(model)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        checkpoint.save(model, net_for(served.net.config), served.provenance, "# other weights\n")
    return Oracle(model, card)


async def drain(soak: Soak) -> list[Result]:
    """SIGTERM under load, with time to finish everything and with too little."""
    most = max(soak.plan.clients)
    return [
        await ended_by_sigterm(soak, 120, min(64, most), enough=True),
        await ended_by_sigterm(soak, 1, most, enough=False),
    ]


async def ended_by_sigterm(soak: Soak, limit_s: float, clients: int, *, enough: bool) -> Result:
    """enough: everything under way should be finished in that time, so the process should end
    before it is over.
    """
    result = Result(f"SIGTERM under load, {limit_s:g} s to drain, {clients:,} clients")
    records: list[Record] = []
    with soak.doomed(f"--drain-timeout {limit_s} --max-queue {4 * clients}") as service:
        told = asyncio.Event()

        async def client() -> None:
            while not told.is_set():
                # a new one each time: nothing is sent into one that is being closed
                connection = service.connection()
                records.append(
                    await connection.ask(
                        soak.draw(
                            n=soak.random.choice((1, 1, 4)), stream=soak.random.random() < 0.2
                        )
                    )
                )
                connection.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(gather(soak, (client() for _ in range(clients))))
            await asyncio.sleep(min(3.0, soak.plan.seconds))
            signalled = time.monotonic()
            service.process.process.send_signal(signal.SIGTERM)
            exited = asyncio.get_running_loop().run_in_executor(
                None, service.process.process.wait, limit_s + 60
            )
            await asyncio.sleep(0.5)  # some ask after the signal too
            told.set()
        status = await exited
        took = time.monotonic() - signalled
        oracle = soak.oracle(soak.plan.model, service.card)
    before = [record for record in records if record.began < signalled]
    # or kept out
    answered = before + [
        record for record in records if record.began >= signalled and record.status
    ]
    result.outcomes = Counter(record.outcome for record in answered)
    result.failures += unanswered(answered) + otherwise(answered, [oracle])
    codes = Counter(record.code or record.outcome for record in before)
    if not set(codes) <= {"completed", "draining"}:
        result.failures.append(f"requests ended as {dict(codes)}")
    if not any(record.ended > signalled for record in before):
        result.failures.append("nothing was under way when the signal came")
    if status != 0:
        result.failures.append(f"exit status {status}")
    if took > (limit_s if enough else limit_s + CLOSING_S):
        result.failures.append(f"it took {took:.1f} s to end")
    result.notes.append(
        f"exit {status} after {took:.1f} s; of those sent before it "
        + ", ".join(f"{count} {code}" for code, count in sorted(codes.items()))
    )
    return result


async def kill(soak: Soak) -> list[Result]:
    """kill -9 under load, and a process that begins again."""
    result = Result("kill -9 under load, and again")
    with soak.doomed() as service:
        working = asyncio.ensure_future(closed_loop(soak, service, 16, seconds=2.0))
        await asyncio.sleep(1.0)
        killed = time.monotonic()
        service.process.process.kill()
        if not (
            under_way := [
                record for record in await working if record.began < killed < record.ended
            ]
        ):
            result.failures.append("nothing was under way when the process was killed")
    with soak.doomed() as service:
        oracle = soak.oracle(soak.plan.model, service.card)
        record = await service.connection().ask(soak.draw())
        if record.outcome != "completed":
            result.failures.append(
                f"the process that began again answers {record.outcome} {record.code}"
            )
        result.failures += otherwise([record], [oracle])
        result.notes.append(
            f"{len(under_way)} requests were under way, and are lost; ready again in "
            f"{service.ready_s:.1f} s"
        )
        if service.ready_s > READY_S:
            result.missed.append(f"ready after {service.ready_s:.1f} s, not {READY_S:g} or less")
    return [result]
