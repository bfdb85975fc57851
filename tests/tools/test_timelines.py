"""The picture of the two timelines is what its script draws."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tools import timelines


def test_the_picture_is_up_to_date() -> None:
    assert timelines.main(["--check"]) == 0


def test_everything_lies_inside() -> None:
    picture = ET.fromstring(timelines.draw())
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for box in picture.iter("{http://www.w3.org/2000/svg}rect"):
        place = {name: float(box.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
        assert 0 <= place["x"] <= place["x"] + place["width"] <= width
        assert 0 <= place["y"] <= place["y"] + place["height"] <= height
