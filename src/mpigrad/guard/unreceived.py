"""What is wrong with a program that has come to its end: messages that nobody has received."""

from __future__ import annotations

from typing import Any

from mpigrad.guard.board_reader import Reader, layout, words

__all__ = ["unreceived"]


def unreceived(slots: Any) -> str:
    """The error about messages that were sent and never received, or "".

    MPI says nothing of a short message that is left over. Where a receive of the same tag was meant
    for a later one, it has taken this one: every message after it was out by one.
    Nothing is said where an operation has failed, which the program has caught.
    """
    if slots["unaccounted"].any():
        return ""
    reader, lines = Reader(slots), []
    for r, slot in enumerate(slots):
        channels = slot["channels"]
        for channel in channels[(channels["id"] != 0) & (channels["sent"] > 0)]:
            identity, tag = int(channel["id"]), int(channel["tag"])
            members = reader.members(identity)
            receiver = members.get(int(channel["peer"]))
            sender = next((m.rank for m in members.values() if m.slot == r), None)
            if receiver is None or sender is None or reader.unknown(receiver):
                continue  # on another host, or of a communicator that is gone, or not counted
            taken = reader.channel(receiver.slot, identity, sender, tag)
            received = 0 if taken is None else int(taken["posted"])
            if left := max(0, int(channel["sent"]) - received):
                message = reader.message(r, identity, receiver.rank, tag, received + 1)
                to = f"to rank {reader.world(receiver.slot)} ({reader.tag(receiver.entry, tag)})"
                what = f"{left} message{'s' * (left > 1)} {to}"
                if message is not None:
                    site = reader.site(r, int(message["site"]))
                    first = f"{layout(message['part'])} by {words(message['operation'])} at {site}"
                    what += f", {'the first of them ' * (left > 1)}{first}"
                lines.append(f"  rank {reader.world(r)}: {what}")
    if not lines:
        return ""
    return "\n".join([
        "mpigrad: messages were sent that nobody has received:",
        *lines,
        "Receive each of them, on the rank and with the tag that its send names. Where a "
        "derivative or a batch sent them and some ranks' operands are constant, take mpigrad's "
        "grad, jvp, vjp or vmap.",
    ])  # fmt: skip
