"""The timeline of a script: its waits and uploads by line, and the messages that its devices executed. Pure."""

from __future__ import annotations

from collections.abc import Callable

from onebox.report.figures.chrome_trace import Span, Timeline
from onebox.vgpu import MessageEvent, ScriptEvent, ScriptEvents, ScriptLine, place_of, text_of

_NAMES = 8
"""The most operators of a message that are named."""

_WORDS = {"wait": "wait", "ahead": "wait for the devices", "upload": "upload"}


def script_timeline(events: ScriptEvents, name_of: Callable[[int], str]) -> Timeline:
    """Return the timeline of a script.

    Args:
        events: What the script and its devices did.
        name_of: Returns the name of a device by its number.

    Returns:
        A timeline with a track for each thread of the script, and one for each device.
    """
    timeline = Timeline()
    for event in events.of_threads:
        timeline.add("script", event.thread, [_of_thread(event)])
    for worker in sorted({message.worker for message in events.of_devices}):
        own = [_of_device(message) for message in events.of_devices if message.worker == worker]
        timeline.add(name_of(worker), "operators", own)
    return timeline


def _of_thread(event: ScriptEvent) -> Span:
    args: dict[str, object] = _about(event.line)
    if event.kind == "upload":
        args["size_bytes"] = event.size_bytes
    name = f"{_WORDS[event.kind]} {args.get('line', '')}".rstrip()
    return Span(name=name, category=event.kind, start_ns=event.start_ns, end_ns=event.end_ns, args=args)


def _of_device(message: MessageEvent) -> Span:
    args: dict[str, object] = _about(message.line)
    if message.after is not None:
        args["after"] = place_of(message.after)
    count = message.operators.total()
    if count:
        args["operators"] = ", ".join(f"{name} {each}" for name, each in message.operators.most_common(_NAMES))
    if message.waited_ns:
        args["waited_us"] = message.waited_ns // 1000
    what = f"{count} operator{'s' * (count != 1)} up to" if count else "reply to"
    name = f"{what} {args.get('line', 'the end')}"
    return Span(name=name, category="compute", start_ns=message.start_ns, end_ns=message.end_ns, args=args)


def _about(line: ScriptLine | None) -> dict[str, object]:
    return {} if line is None else {"line": place_of(line), "text": text_of(line)}
