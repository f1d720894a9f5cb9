from xml.etree import ElementTree

from meshwright.report.loss_curves import COLOURS, LossCurve, LossPanel, picture

SVG = "{http://www.w3.org/2000/svg}"


def panel(title: str, *names: str, logarithmic: bool = False) -> LossPanel:
    points = ((1.0, 4.0), (10.0, 3.0), (100.0, 2.0))
    curves = tuple(LossCurve(name=name, points=points) for name in names)
    return LossPanel(title=title, unit="seconds", curves=curves, logarithmic=logarithmic)


def lines(drawn: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(drawn).findall(f"{SVG}polyline")


def places(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in line.attrib["points"].split())]


def test_a_curve_has_one_colour_in_all_panels_and_stands_in_the_legend_once():
    drawn = picture("Losses", [panel("slow", "plain", "a & b"), panel("fast", "a & b")])
    assert [line.attrib["stroke"] for line in lines(drawn)] == [COLOURS[0], COLOURS[1], COLOURS[1]]
    words = [each.text for each in ElementTree.fromstring(drawn).findall(f"{SVG}text")]
    assert words.count("a & b") == 1


def test_a_logarithmic_axis_has_equal_room_for_equal_ratios_and_lower_losses_are_lower():
    drawn = [picture("Losses", [panel("one", "a", logarithmic=how)]) for how in (True, False)]
    straight, bent = (places(lines(each)[0]) for each in drawn)
    assert abs((straight[1][0] - straight[0][0]) - (straight[2][0] - straight[1][0])) < 0.2
    assert (bent[1][0] - bent[0][0]) * 9 < bent[2][0] - bent[1][0]
    assert straight[0][1] < straight[1][1] < straight[2][1]


def test_losses_above_the_most_are_cut():
    top = places(lines(picture("Losses", [panel("one", "a")], most=3.0))[0])
    assert top[0][1] == top[1][1] < top[2][1]
