"""Blocks of a drawing that know their size and stand in rows and columns, and the SVG document around them.

Text is monospaced, so that its width is known without a font. Colours are classes with a light and a dark value each: a viewer
that knows neither `prefers-color-scheme` nor variables shows the light ones.
"""

import html
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

_CHARACTER, _LINE = 8, 18
_MARGIN = 16
# Class: (attribute, light, dark). The pairs that are read as text have a contrast of at least 4.5.
_COLOURS = {
    "ground": ("fill", "#ffffff", "#0d1117"),
    "card": ("fill", "#f6f8fa", "#151b23"),
    "inset": ("fill", "#ffffff", "#0d1117"),
    "box": ("fill", "#eaeef2", "#262c36"),
    "chosen": ("fill", "#0969da", "#4493f8"),
    "line": ("stroke", "#afb8c1", "#4d5661"),
    "head": ("fill", "#59636e", "#9198a1"),
    "ink": ("fill", "#1f2328", "#f0f6fc"),
    "soft": ("fill", "#59636e", "#9198a1"),
    "onchosen": ("fill", "#ffffff", "#0d1117"),
}


class Block(NamedTuple):
    """A rectangle of the drawing; its elements count from its own upper left corner."""

    width: int
    height: int
    elements: tuple[str, ...] = ()


def text(words: str, kind: str = "ink", *, bold: bool = False) -> Block:
    """One line. Its characters are made safe for XML; those that no XML file may hold become '?'."""
    shown = html.escape("".join(c if c.isprintable() else "?" for c in words), quote=False)
    weight = ' font-weight="600"' if bold else ""
    return Block(_width(words), _LINE, (f'<text class="tw-{kind}" x="0" y="13"{weight}>{shown}</text>',))


def column(blocks: Sequence[Block], gap: int = 0) -> Block:
    """The blocks below one another, flush left."""
    elements: list[str] = []
    y = 0
    for block in blocks:
        elements += _moved(block, 0, y)
        y += block.height + gap
    return Block(max((block.width for block in blocks), default=0), max(0, y - gap), tuple(elements))


def row(blocks: Sequence[Block], gap: int = 0, *, middle: bool = False) -> Block:
    """The blocks beside one another, flush at the top or centred on one line."""
    height = max((block.height for block in blocks), default=0)
    elements: list[str] = []
    x = 0
    for block in blocks:
        elements += _moved(block, x, (height - block.height) // 2 if middle else 0)
        x += block.width + gap
    return Block(max(0, x - gap), height, tuple(elements))


def wrapped(blocks: Sequence[Block], width: int, gap: int, *, middle: bool = False) -> Block:
    """The blocks in rows, as many beside one another as fit into `width`."""
    rows: list[list[Block]] = []
    used = 0
    for block in blocks:
        if not rows or used + block.width > width:
            rows.append([])
            used = 0
        rows[-1].append(block)
        used += block.width + gap
    return column([row(part, gap, middle=middle) for part in rows], gap)


def wide(block: Block, width: int, *, middle: bool = False) -> Block:
    """The block with room to its right (or on both sides), so that columns of a table stand below one another."""
    return Block(max(width, block.width), block.height, tuple(_moved(block, max(0, width - block.width) // 2 if middle else 0, 0)))


def framed(block: Block, kind: str, padding: int, radius: int = 6) -> Block:
    """The block in a filled, rounded frame."""
    width, height = block.width + 2 * padding, block.height + 2 * padding
    frame = f'<rect class="tw-{kind} tw-line" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="{radius}"/>'
    return Block(width, height, (frame, *_moved(block, padding, padding)))


def chip(lines: Sequence[str], width: int = 0, *, chosen: bool = False) -> Block:
    """A small frame with centred lines of text, at least `width` wide."""
    kind = "onchosen" if chosen else "ink"
    inner = max([width - 12, *(_width(line) for line in lines)])
    return framed(column([wide(text(line, kind), inner, middle=True) for line in lines]), "chosen" if chosen else "box", 6, 4)


def mark() -> Block:
    """A small filled square, for a legend."""
    return Block(14, 14, ('<rect class="tw-chosen" width="14" height="14" rx="3"/>',))


def arrow(above: str, below: str) -> Block:
    """A line to the right with a word above and one below."""
    width = max(_width(above), _width(below)) + 24
    y = _LINE + 4
    line = f'<path class="tw-line" fill="none" d="M4 {y}H{width - 10}"/>'
    head = f'<path class="tw-head" d="M{width - 10} {y - 4}L{width - 2} {y}L{width - 10} {y + 4}Z"/>'
    labels = (*_moved(text(above, "soft"), 8, 0), *_moved(text(below, "soft"), 8, y + 4))
    return Block(width, 2 * (_LINE + 4), (line, head, *labels))


def document(block: Block, title: str) -> str:
    """A whole SVG file, with a margin and a ground of its own; `title` is what a screen reader says."""
    width, height = block.width + 2 * _MARGIN, block.height + 2 * _MARGIN
    light = "".join(f".tw-{name}{{{attribute}:{colour}}}" for name, (attribute, colour, _) in _COLOURS.items())
    dark = "".join(f".tw-{name}{{{attribute}:{colour}}}" for name, (attribute, _, colour) in _COLOURS.items())
    body = "\n".join(_moved(block, _MARGIN, _MARGIN))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="13">\n'
        f"<title>{html.escape(title, quote=False)}</title>\n"
        f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>\n"
        f'<rect class="tw-ground" width="{width}" height="{height}"/>\n{body}\n</svg>\n'
    )


def _moved(block: Block, x: int, y: int) -> list[str]:
    if not block.elements:
        return []
    if x == y == 0:
        return list(block.elements)
    return [f'<g transform="translate({x} {y})">', *block.elements, "</g>"]


def _width(words: str) -> int:
    return _CHARACTER * sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in words)
