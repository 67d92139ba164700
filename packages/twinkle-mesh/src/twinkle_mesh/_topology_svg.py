"""A topology as an SVG drawing."""

from twinkle_mesh._group import DeviceGroup
from twinkle_mesh._labels import count, left_out, pick, shorten_ids
from twinkle_mesh._mesh_svg import legend, mesh_block
from twinkle_mesh._plan import WorkerSlot
from twinkle_mesh._svg import Block, arrow, chip, column, document, framed, row, text, wide, wrapped
from twinkle_mesh._topology import MOST_GROUPS, NodeShare, Topology, title_of, way_of_a_batch

_WIDTH = 1100
_WORKERS_IN_A_ROW = 4


def topology_svg(topology: Topology) -> str:
    """An SVG file: a card for each group, then the way of a batch."""
    cards: list[Block] = []
    for i in pick(len(topology.groups), MOST_GROUPS):
        words = left_out(len(topology.groups), "group", MOST_GROUPS)
        cards.append(framed(text(words, "soft"), "card", 14) if i is None else _card(topology, topology.groups[i]))
    hops = way_of_a_batch(topology.components)
    steps = [row([arrow(hop.taken or hop.split, hop.split if hop.taken else ""), framed(text(hop.to), "inset", 8)], 6, middle=True) for hop in hops]
    boxes = [framed(text("driver"), "inset", 8), *steps]
    way = [legend(), text("the way of a batch", bold=True), wrapped(boxes, _WIDTH, 6, middle=True)] if hops else []
    title = f"{count(len(topology.groups), 'device group')} with {count(len(topology.components), 'component')}"
    return document(column([wrapped(cards, _WIDTH, 16), *way], 12), title)


def _card(topology: Topology, group: DeviceGroup) -> Block:
    shares = topology.shares.get(group.name, ())
    parts = [text(title_of(group), bold=True)]
    if shares:
        nodes = [text(left_out(len(shares), "node"), "soft") if i is None else _node(shares[i]) for i in pick(len(shares))]
        parts.append(wrapped(nodes, _WIDTH, 8, middle=True))
    parts += [mesh_block(component.mesh, component.name) for component in topology.on(group.name)]
    return framed(column(parts, 14), "card", 14, 8)


def _node(share: NodeShare) -> Block:
    slots = share.slots
    labels = [None if i is None else _worker(slots[i]) for i in pick(len(slots))]
    width = max(chip(label).width for label in labels if label is not None)
    workers = [wide(text("...", "soft"), width, middle=True) if label is None else chip(label, width) for label in labels]
    rows = [row(workers[start : start + _WORKERS_IN_A_ROW], 4, middle=True) for start in range(0, len(workers), _WORKERS_IN_A_ROW)]
    return framed(column([text(share.title, "soft"), *rows], 4), "inset", 8)


def _worker(slot: WorkerSlot) -> list[str]:
    ids = slot.device_ids
    return [f"worker {slot.rank}", *([f"{'device' if len(ids) == 1 else 'devices'} {shorten_ids(ids)}"] if ids else [])]
