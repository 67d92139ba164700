import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_mesh import DeviceGroup, DeviceMesh, InvalidMeshError, Node, draw_topology, plan_placement

SVG = "{http://www.w3.org/2000/svg}"


def texts(element: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def check_boxes(element: ElementTree.Element, width: float, height: float, x: float = 0, y: float = 0) -> None:
    """Nothing lies outside the drawing; the widths of texts are those of the monospaced font that it asks for."""
    for child in element:
        dx, dy = x, y
        moved = re.fullmatch(r"translate\((\S+) (\S+)\)", child.get("transform", ""))
        if moved:
            dx, dy = x + float(moved[1]), y + float(moved[2])
        if child.tag == f"{SVG}rect":
            assert dx + float(child.get("x", 0)) + float(child.attrib["width"]) <= width
            assert dy + float(child.get("y", 0)) + float(child.attrib["height"]) <= height
        if child.tag == f"{SVG}text":
            assert dx >= 0
            assert dx + 7.83 * len(child.text or "") <= width
            assert dy + 13 <= height
        check_boxes(child, width, height, dx, dy)


def parse(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"
    check_boxes(root, width, height)
    return root


@given(data=st.data())
def test_any_mesh_is_valid_xml_and_stays_inside_its_frame(meshes: st.SearchStrategy[DeviceMesh], data: st.DataObject) -> None:
    mesh = data.draw(meshes)
    shown = texts(parse(mesh.draw(format="svg")))
    assert shown[0] == mesh.draw().splitlines()[0]
    assert f"data {mesh.data_world_size - 1}" in shown


def test_a_small_mesh_shows_every_rank_once_and_fills_those_that_speak() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, cp_size=2, tp_size=2, pp_size=2)
    root = parse(mesh.draw(format="svg"))
    numbers = [text for text in texts(root) if text.isdecimal()]
    assert sorted(map(int, numbers)) == list(range(16))
    filled = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "tw-onchosen"]
    assert filled == [str(rank) for rank in mesh.representatives()]
    assert {"stage 0", "stage 1", "data 0", "data 1"} <= set(texts(root))


@pytest.mark.parametrize("sizes", [{"dp_size": 1024, "tp_size": 8, "pp_size": 16}, {"tp_size": 256, "pp_size": 2}, {"cp_size": 3, "ulysses_size": 7}])
def test_a_large_mesh_is_shortened_to_a_page(sizes: dict[str, Any]) -> None:
    root = parse(DeviceMesh.from_sizes(**sizes).draw(format="svg"))
    assert float(root.attrib["width"]) < 1400
    assert float(root.attrib["height"]) < 1000
    assert len(texts(root)) < 400


def topology(format: str = "svg") -> str:
    groups = [
        DeviceGroup("actor", 8, "cuda"),
        DeviceGroup("sampler", 4, "cuda", visible_devices="GPU-aa,GPU-bb", gpus_per_worker=2),
        DeviceGroup("reward", 2, "cpu"),
    ]
    uuids = ["GPU-aa00", "GPU-bb00"], ["GPU-aa11", "GPU-bb11"]
    nodes = [Node("10.0.0.1", 8, 64), *(Node(f"10.0.0.{i}", 2, 64, gpu_ids=ids) for i, ids in enumerate(uuids, 2))]
    mesh = DeviceMesh.from_sizes(dp_size=2, pp_size=2, tp_size=2)
    components = [("sampler", "sampler", None), ("reward", "reward", None), ("model", "actor", mesh)]
    return draw_topology(groups, components, plan_placement(groups, nodes), format=format)  # type: ignore[arg-type]


def test_a_topology_shows_groups_nodes_workers_devices_meshes_and_the_way() -> None:
    shown = texts(parse(topology()))
    for words in (
        "group actor: 8 cuda devices, 8 workers",
        "group sampler: 4 cuda devices, 2 workers, only devices GPU-aa,GPU-bb",
        "node 2 (10.0.0.3)",
        "worker 1",
        "devices GPU-aa11 GPU-bb11",
        "8 ranks on cuda: pp 2 x dp 2 x tp 2",
        "the way of a batch",
        "taken from ranks 4 6",
    ):
        assert words in shown
    assert shown.count("driver") == 2
    # The same facts as in plain text.
    plain = topology("text")
    for words in shown:
        if words.startswith(("group ", "node ", "taken ")):
            assert words in plain


def test_a_topology_of_many_groups_and_nodes_is_shortened() -> None:
    groups = [DeviceGroup(f"g{i}", 160, "cuda") for i in range(100)]
    components = [(f"c{i}", f"g{i}", None) for i in range(100)]
    svg = draw_topology(groups, components, plan_placement(groups, [Node(f"n{i}", 8, 8) for i in range(2000)]), format="svg")
    shown = texts(parse(svg))
    assert {"... 89 more groups", "... 13 more nodes", "... 153 more data ranks", "c99"} <= set(shown)
    assert len(svg) < 1_000_000


def test_names_cannot_break_the_file() -> None:
    name = '<a & "b">\x00\x1b'
    groups = [DeviceGroup(name, 1, "cpu")]
    root = parse(draw_topology(groups, [(name, name, None)], format="svg"))
    assert 'group <a & "b">??: 1 cpu worker' in texts(root)


def test_wide_characters_have_room() -> None:
    narrow, wide = (parse(draw_topology([DeviceGroup(name, 1, "cpu")], [], format="svg")) for name in ("a" * 40, "訓" * 40))
    assert float(wide.attrib["width"]) - float(narrow.attrib["width"]) == 40 * 8


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_is_readable_on_light_and_on_dark_pages() -> None:
    """Contrast of at least 4.5, as WCAG 2.2 asks of text (criterion 1.4.3), in both themes."""
    style = parse(topology()).findtext(f"{SVG}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark){")
    for theme in (light, dark):
        colours = dict(re.findall(r"\.tw-(\w+)\{\w+:(#\w+)\}", theme))
        for words, grounds in {"ink": ("ground", "card", "inset", "box"), "soft": ("ground", "card", "inset"), "onchosen": ("chosen",)}.items():
            for ground in grounds:
                lighter, darker = sorted((luminance(colours[words]), luminance(colours[ground])), reverse=True)
                assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (words, ground)


def test_every_class_that_is_used_has_a_colour() -> None:
    root = parse(topology())
    style = root.findtext(f"{SVG}style") or ""
    used = {name for element in root.iter() for name in element.get("class", "").split()}
    assert len(used) > 6
    for name in used:
        assert style.count(f".{name}{{") == 2


def test_a_drawing_is_the_same_each_time_and_fetches_nothing() -> None:
    assert topology() == topology()
    assert set(re.findall(r"\w+://[^\"\s]+", topology())) == {"http://www.w3.org/2000/svg"}


def test_another_format_is_refused() -> None:
    for draw in (lambda: DeviceMesh.from_sizes().draw(format="png"), lambda: draw_topology([], [], format="png")):  # type: ignore[arg-type]
        with pytest.raises(InvalidMeshError, match="format='png': a drawing is 'text' or 'svg'"):
            draw()


def test_drawing_nothing_is_an_empty_page() -> None:
    assert draw_topology([], []) == ""
    assert texts(parse(draw_topology([], [], format="svg"))) == []
