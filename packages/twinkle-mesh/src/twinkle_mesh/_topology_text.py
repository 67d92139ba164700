"""A topology as plain text."""

from collections.abc import Sequence

from twinkle_mesh._labels import left_out, pick, shorten_ids, span
from twinkle_mesh._mesh_text import mesh_text
from twinkle_mesh._topology import MOST_GROUPS, Hop, NodeShare, Topology, title_of, way_of_a_batch


def topology_text(topology: Topology) -> str:
    """A box for each group, then the way of a batch."""
    parts: list[str] = []
    for i in pick(len(topology.groups), MOST_GROUPS):
        if i is None:
            parts.append(left_out(len(topology.groups), "group", MOST_GROUPS))
            continue
        group = topology.groups[i]
        body = _nodes(topology.shares.get(group.name, ()))
        for component in topology.on(group.name):
            drawn = mesh_text(component.mesh).splitlines()
            body += ["", f"{component.name}: {drawn[0]}", *drawn[1:]]
        parts.append(_box(title_of(group), body[1:] if body and not body[0] else body))
    way = way_of_a_batch(topology.components)
    return "\n\n".join([*parts, _way(way)] if way else parts)


def _nodes(shares: Sequence[NodeShare]) -> list[str]:
    lines: list[str] = []
    for i in pick(len(shares)):
        if i is None:
            lines.append(left_out(len(shares), "node"))
            continue
        slots = shares[i].slots
        devices = [device_id for slot in slots for device_id in slot.device_ids]
        text = f"{shares[i].title}: {'worker' if len(slots) == 1 else 'workers'} {span([slot.rank for slot in slots])}"
        lines.append(f"{text}, {'device' if len(devices) == 1 else 'devices'} {shorten_ids(devices)}" if devices else text)
    return lines


def _box(title: str, body: Sequence[str]) -> str:
    width = max(len(line) for line in [title + "  ", *body])
    top = f"+- {title} ".ljust(width + 3, "-") + "+"
    return "\n".join([top, *(f"| {line.ljust(width)} |" for line in body), "+" + "-" * (width + 2) + "+"])


def _way(hops: Sequence[Hop]) -> str:
    lines = ["the way of a batch", "  driver"]
    for hop in hops:
        lines += [f"    | {'; '.join(filter(None, (hop.taken, hop.split)))}".rstrip(), "    v", f"  {hop.to}"]
    return "\n".join(lines)
