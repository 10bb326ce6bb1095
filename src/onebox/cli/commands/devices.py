"""``onebox devices``: the devices of a pool; those of other machines without leasing them."""

from __future__ import annotations

import msgspec

from onebox.cli.agent_watch import agent_parts, connected
from onebox.cli.console import OutputConsole
from onebox.cli.options.pools import DevicesConfig
from onebox.pool import DeviceInfo, Pool, open_pool
from onebox.pool.spec import AgentPart, wants
from onebox.report import DeviceRow, OfferRow, device_table, offer_table
from onebox.wire.protocol.agents import Offer


def show_devices(config: DevicesConfig) -> None:
    """Print a pool's devices, as a table or as a JSON list.

    Raises:
        OneboxError: The pool cannot be opened, or its agents cannot be queried.
    """
    parts = agent_parts(config.pool)
    if parts is not None:
        _show_offers(parts, json=config.json)
        return
    with open_pool(config.pool, threads=config.threads, memory=config.memory, plain_links=config.plain_links) as pool:
        if config.json:
            print(msgspec.json.encode(pool.devices).decode())
        else:
            print_devices(pool, OutputConsole())


def print_devices(pool: Pool, console: OutputConsole) -> None:
    """Print the table of a pool's devices."""
    console.print(device_table(_row(device) for device in pool.devices))


def _row(device: DeviceInfo) -> DeviceRow:
    host = "" if device.host == "localhost" else f" on {device.host}"
    return DeviceRow(
        device=str(device.number),
        kind=device.device,
        name=device.name + host,
        threads=device.threads,
        memory_bytes=device.memory_bytes,
        emulated=device.emulated,
        speed=device.speed,
    )


def _show_offers(parts: tuple[AgentPart, ...], *, json: bool) -> None:
    rows: list[OfferRow] = []
    with connected([part.address for part in parts]) as lines:
        for part, line in zip(parts, lines, strict=True):
            offers = line.inspect().offers
            for want in wants(part, offers):
                rows.append(
                    OfferRow(
                        number=len(rows), address=part.address, device=want.device, offer=_meant(want.device, offers)
                    )
                )
    if json:
        print(msgspec.json.encode([_plain(row) for row in rows]).decode())
        return
    console = OutputConsole()
    table = console.fitting(lambda narrow: offer_table(rows, narrow=narrow))
    console.widen([table])
    console.print(table)


def _meant(device: str, offers: tuple[Offer, ...]) -> Offer | None:
    """Return the offer of a device; None for any GPU."""
    return next((offer for offer in offers if offer.device == device), None)


def _plain(row: OfferRow) -> dict[str, object]:
    """Return a device in its JSON form."""
    found: dict[str, object] = {"number": row.number, "host": row.address, "device": row.device}
    if row.offer is None:
        return found
    offer = row.offer
    return found | {
        "name": offer.name,
        "memory_bytes": offer.memory_bytes,
        "free_bytes": offer.free_bytes,
        "threads": offer.threads,
        "load": offer.load,
        "holders": [msgspec.structs.asdict(holder) for holder in offer.holders],
    }
