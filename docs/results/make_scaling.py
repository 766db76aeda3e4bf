"""docs/results/scaling.svg, and the tables of docs/scaling.md: python -m docs.results.make_scaling

Four ways to serve, drawn from the clients to the engines, and below them what a request costs on each and what tells
how loaded a replica is. The figures are those of scaling-forms.json and replica-costs.json beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from convoy.models.page.axis import Axis, number
from convoy.models.page.chart import Chart
from convoy.models.page.markup import CHART_STYLE, add, element, rendered

FOLDER = Path(__file__).parent
PICTURE, PAGE = FOLDER / "scaling.svg", FOLDER.parent / "scaling.md"
# How many replicas, how many balancers, how often each is asked: the assumptions of the last table.
_REPLICAS, _BALANCERS, _CHECK_EVERY_S, _SCRAPE_EVERY_S = (100, 1_000, 5_000), 10, 1.0, 15.0
_WIDTH, _PANEL, _PANEL_TOP, _CHART_TOP, _CHART_HEIGHT = 1040.0, 260.0, 34.0, 300.0, 300.0
_STYLE = """
  .box { fill: var(--panel); stroke: var(--soft); } .node { fill: none; stroke: var(--rule); stroke-width: 1.5;
    stroke-dasharray: 5 3; } .engine { fill: var(--colour); opacity: .85; } .way { stroke: var(--soft);
    stroke-width: 1.3; fill: none; } svg .on { fill: var(--paper); font-weight: bold; }
"""


def drawn() -> str:
    """The whole picture."""
    svg = element(
        "svg",
        element("title", "From one machine to many"),
        element("style", CHART_STYLE + _STYLE),
        element("rect", width="100%", height="100%", fill="var(--paper)"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:g} {_CHART_TOP + _CHART_HEIGHT + 34:g}",
        font_family="sans-serif",
    )
    for at, panel in enumerate((_one_process, _one_machine, _ray, _kubernetes)):
        add(svg, element("g", *panel(), transform=f"translate({at * _PANEL:g} 0)"))
    costs = json.loads((FOLDER / "scaling-forms.json").read_text())
    add(svg, _costs(costs))
    _add_load(svg, json.loads((FOLDER / "replica-costs.json").read_text())["load"])
    return rendered(svg) + "\n"


# The ways


def _title(text: str, below: str) -> list[Element]:
    return [
        element("text", text, x=_PANEL / 2, y=20, font_weight="bold", class_="label middle"),
        element("text", below, x=_PANEL / 2, y=_PANEL_TOP + 242, class_="middle"),
    ]


def _box(text: str, x: float, y: float, width: float = 88, class_: str = "box") -> list[Element]:
    """A box around its middle, and its name."""
    inside = "label middle on" if class_.startswith("engine") else "label middle"
    return [
        element("rect", x=x - width / 2, y=y - 12, width=width, height=24, rx=4, class_=class_),
        element("text", text, x=x, y=y + 4, class_=inside),
    ]


def _node(x: float, width: float, top: float, bottom: float, text: str = "") -> list[Element]:
    """A machine."""
    frame = element("rect", x=x - width / 2, y=top, width=width, height=bottom - top, rx=6, class_="node")
    return [frame, element("text", text, x=x - width / 2 + 6, y=bottom - 6)] if text else [frame]


def _way(x: float, y: float, to_x: float, to_y: float) -> Element:
    """From the foot of one box to the top of another."""
    return element("path", d=f"M{x:g} {y + 12:g} L{to_x:g} {to_y - 12:g}", class_="way")


def _one_process() -> list[Element]:
    middle = _PANEL / 2
    return [
        *_title("One process", "convoy serve"),
        *_node(middle, 190, 84, 254, "machine"),
        _way(middle, 50, middle, 118),
        _way(middle, 118, middle, 164),
        _way(middle, 164, middle, 210),
        *_box("clients", middle, 50),
        *_box("edge", middle, 118),
        *_box("queue", middle, 164),
        *_box("engine", middle, 210, class_="engine k0"),
    ]


def _one_machine() -> list[Element]:
    middle, sides = _PANEL / 2, (_PANEL / 2 - 56, _PANEL / 2 + 56)
    return [
        *_title("One machine, several GPUs", "convoy serve --edges auto"),
        *_node(middle, 232, 84, 254, "machine"),
        *(_way(middle, 50, side, 118) for side in sides),
        *(_way(side, 118, middle, 164) for side in sides),
        *(_way(middle, 164, middle + at, 210) for at in (-72, 0, 72)),
        *_box("clients", middle, 50),
        *(part for side in sides for part in _box("edge", side, 118)),
        *_box("one queue", middle, 164),
        *(part for at in (-72, 0, 72) for part in _box("GPU", middle + at, 210, 60, "engine k0")),
    ]


def _ray() -> list[Element]:
    middle, sides = _PANEL / 2, (_PANEL / 2 - 62, _PANEL / 2 + 62)
    return [
        *_title("Ray", "serve run convoy.ray:build_app"),
        *(part for side in sides for part in _node(side, 114, 84, 254, "node")),
        *(_way(middle, 50, side, 118) for side in sides),
        *(_way(side, 118, other, 198) for side in sides for other in sides),
        *_box("clients", middle, 50),
        *(part for side in sides for part in _box("HAProxy", side, 118)),
        *(part for side in sides for part in _box("replica", side, 198, class_="engine k0")),
    ]


def _kubernetes() -> list[Element]:
    middle, sides = _PANEL / 2, (_PANEL / 2 - 62, _PANEL / 2 + 62)
    return [
        *_title("Kubernetes", "kubectl apply -k, or KServe"),
        *(part for side in sides for part in _node(side, 114, 158, 254, "node")),
        _way(middle, 50, middle, 118),
        *(_way(middle, 118, side, 198) for side in sides),
        *_box("clients", middle, 50),
        *_box("balancer", middle, 118),
        *(part for side in sides for part in _box("pod", side, 198, class_="engine k0")),
    ]


# The figures


def _costs(costs: dict[str, list[dict[str, float | str]]]) -> Element:
    """Bars of processor time for a request, on a logarithmic axis."""
    left, top, end = 214.0, _CHART_TOP + 30, _WIDTH / 2 - 70
    axis = Axis("", 10, 10_000, "log", (10, 100, 1000, 10_000))
    group = element("g")
    name = "CPU for a request in microseconds, logarithmic"
    add(group, element("text", name, x=20, y=_CHART_TOP + 12, font_weight="bold", class_="label"))
    rows = costs["forms"]
    floor = top + 34 * len(rows)
    for tick in axis.ticks():
        at = left + axis.place(tick) * (end - left)
        add(group, element("path", d=f"M{at:.1f} {top} V{floor}", class_="grid"))
        add(group, element("text", f"{tick:,g}", x=at, y=floor + 15, class_="middle"))
    for place, row in enumerate(rows):
        y, value = top + 34 * place, float(row["cpu_us"])
        width = axis.place(value) * (end - left)
        add(group, element("text", str(row["name"]), x=left - 8, y=y + 21, class_="label end"))
        add(group, element("rect", x=left, y=y + 7, width=width, height=20, class_=f"bar {row['class']}"))
        add(group, element("text", f"{value:,.0f}", x=left + width + 6, y=y + 21, class_="label"))
    add(group, element("path", d=f"M{left} {top} V{floor}", class_="axis"))
    return group


def _add_load(svg: Element, load: list[dict[str, float]]) -> None:
    """Two lines over the load: the one that tells of it and the one that does not."""
    x = Axis("load, percent of what full batches would carry", 0, 100, marked=(0, 25, 50, 75, 100))
    y = Axis("", 0.1, 1000, "log", (0.1, 1, 10, 100, 1000))
    chart = Chart("What tells the load", "Utilisation and requests that wait, over the load", x, y,
                  width=_WIDTH / 2 - 20, height=_CHART_HEIGHT - 40)  # fmt: skip
    chart.line([(one["share_percent"], one["waiting"]) for one in load], "line k1", "requests that wait, on average")
    chart.line([(one["share_percent"], one["utilisation"]) for one in load], "dashed k0", "utilisation of the engine")
    for one in load:
        for name, class_ in (("waiting", "dot k1"), ("utilisation", "dot k0")):
            chart.dot(one["share_percent"], one[name], f"{one['share_percent']:g} %: {one[name]:.2f}", class_)
    left, top = _WIDTH / 2 + 10, _CHART_TOP
    add(svg, element("text", chart.name, x=left + 64, y=top + 12, font_weight="bold", class_="label"))
    chart.svg.attrib.update(
        x=f"{left:g}", y=f"{top + 20:g}", width=f"{_WIDTH / 2 - 20:g}", height=f"{_CHART_HEIGHT - 40:g}"
    )
    add(svg, chart.svg)
    at, y_px = left + 64, top + _CHART_HEIGHT + 8
    for name, class_ in chart.legend:
        add(svg, element("path", d=f"M{at:g} {y_px - 4:g} h22", class_=class_))
        add(svg, element("text", name, x=at + 28, y=y_px, class_="label"))
        at += 60 + 6.2 * len(name)


# The tables


def written(page: str) -> str:
    """The page with its tables as they are now."""
    costs = json.loads((FOLDER / "replica-costs.json").read_text())
    for name, lines in (("load", _load(costs)), ("replica", _replica(costs)), ("shared", _shared(costs))):
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        page = before + mark + "\n".join(lines) + "\n" + rest[rest.index("<!-- end -->") :]
    return page


def _load(costs: dict[str, Any]) -> list[str]:
    rows = []
    for one in costs["load"]:
        share, waiting, batch = f"{one['share_percent']:g} %", number(one["waiting"]), f"{one['mean_batch']:.1f}"
        rows.append(f"| {share} | {one['utilisation']:.2f} | {waiting} | {batch} |")
    return ["| load | utilisation | requests that wait, on average | requests in a batch |", "|---|---|---|---|", *rows]


def _replica(costs: dict[str, Any]) -> list[str]:
    rows = {
        "from its start to ready, the machine's other work aside": f"{costs['start_to_ready_s']:.1f} s",
        "memory, of its own and files'": f"{costs['resident_mib']:.0f} MiB",
        "series in Prometheus, with one model": f"{costs['series']:.0f}",
        "and for each further model": f"{costs['series_per_further_model']:.0f}",
        "a scrape of them": f"{costs['scrape_bytes'] / 1e3:.0f} kB, {costs['cpu_us_per_scrape'] / 1e3:.1f} ms of CPU",
        "a health check": f"{costs['cpu_us_per_health_check'] / 1e3:.2f} ms of CPU",
    }
    return ["| one replica | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def _shared(costs: dict[str, Any]) -> list[str]:
    def row(name: str, of_one: float) -> str:
        return f"| {name} | {' | '.join(number(of_one * count) for count in _REPLICAS)} |"

    checks_per_s = _BALANCERS / _CHECK_EVERY_S
    return [
        f"| replicas | {' | '.join(f'{count:,}' for count in _REPLICAS)} |",
        f"|---|{'---|' * len(_REPLICAS)}",
        row("cores of HAProxy for 10,000 small requests a second in each", 10_000 * _balancer_us() / 1e6),
        row("the same for 27 images a second of ResNet-50 in each", 27 * _balancer_us() / 1e6),
        row("series in Prometheus, one model in each", costs["series"]),
        row(f"samples a second, scraped every {_SCRAPE_EVERY_S:g} s", costs["series"] / _SCRAPE_EVERY_S),
        row(f"health checks a second by {_BALANCERS} balancers, one a second each", checks_per_s),
        _share(costs, checks_per_s),
        row("lists a second in the store, one model, polled every 2 s", 2 / 2),
        row("the same, polled every 60 s", 2 / 60),
    ]


def _share(costs: dict[str, Any], checks_per_s: float) -> str:
    share = 100 * checks_per_s * costs["cpu_us_per_health_check"] / 1e6
    return f"| and what they take of one core in each replica | {' | '.join([f'{share:.2g} %'] * len(_REPLICAS))} |"


def _balancer_us() -> float:
    """Of HAProxy for a request: what the two ways differ by."""
    plain, balanced, *_ = json.loads((FOLDER / "scaling-forms.json").read_text())["forms"]
    return float(balanced["cpu_us"] - plain["cpu_us"])


if __name__ == "__main__":
    PICTURE.write_text(drawn())
    PAGE.write_text(written(PAGE.read_text()))
