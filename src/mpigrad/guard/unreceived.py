"""Find messages that were never received, at the end of a program."""

from __future__ import annotations

from typing import Any

from mpigrad.guard.board_reader import Reader, decode, layout

__all__ = ["unreceived_report"]


def unreceived_report(slots: Any) -> str:
    """Return the error about messages that were sent but never received, or "".

    MPI does not report a short message that is left over. If a receive of the same tag was meant
    for it, every later message was received one receive too early. After an operation that failed
    (and whose error the program caught) the result is "".
    """
    if slots["failure_seen"].any():
        return ""
    reader, lines = Reader(slots), []
    for r, slot in enumerate(slots):
        channels = slot["channels"]
        for channel in channels[(channels["id"] != 0) & (channels["sent"] > 0)]:
            identity, tag = int(channel["id"]), int(channel["tag"])
            members = reader.members(identity)
            receiver = members.get(int(channel["peer"]))
            sender = next((m.rank for m in members.values() if m.slot == r), None)
            if receiver is None or sender is None or reader.counts_unknown(receiver):
                continue  # on another host, of a freed communicator, or not counted
            taken = reader.channel(receiver.slot, identity, sender, tag)
            received = 0 if taken is None else int(taken["posted"])
            if left := max(0, int(channel["sent"]) - received):
                message = reader.message(r, identity, receiver.rank, tag, received + 1)
                to = f"to rank {reader.world(receiver.slot)}{reader.tag(receiver.entry, tag)}"
                text = f"{left} message{'s' * (left > 1)} {to}"
                if message is not None:
                    site = reader.site(r, int(message["site"]))
                    first = f"{layout(message['part'])} by {decode(message['operation'])} at {site}"
                    text += f", {'the first is ' * (left > 1)}{first}"
                lines.append(f"  rank {reader.world(r)}: {text}")
    if not lines:
        return ""
    return "\n".join([
        "mpigrad: messages were sent but never received:",
        *lines,
        "Receive each of these messages on its destination rank, with the tag of its send. If "
        "jax.grad, jvp, vjp or vmap sent it, use mpigrad's version of that function. If the "
        "program means to leave it, set MPIGRAD_UNRECEIVED=warn.",
    ])  # fmt: skip
