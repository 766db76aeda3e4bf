// Five minutes as charts of uPlot, in the page's colours, with their latest figures as text.

const CHART_HEIGHT = 150;
const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A single value between two gaps would be a line without length.
function loneIndices(values) {
  return values.flatMap((value, at) => (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []));
}

class Chart {
  // `show` writes a figure; `group` names the charts whose cursors move together.
  constructor(title, show, group) {
    this.title = title;
    this.show = show;
    this.group = group;
    this.plot = null;
    this.place = element("div", { className: "plot" });
    this.node = element("figure", {}, element("h3", {}, title), this.place);
    this.sizes = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: CHART_HEIGHT }));
    this.sizes.observe(this.place);
  }

  width() {
    return Math.max(200, this.place.clientWidth);
  }

  // `series` has { name, colour, values, fill }; `times` are seconds on this machine's clock, a period apart.
  update(times, series) {
    const shape = JSON.stringify([series.map(one => [one.name, one.colour]), dark.matches]);
    const data = [times, ...series.map(one => one.values)];
    if (shape !== this.shape) {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(series), data, this.place);
      this.shape = shape;
    } else {
      this.plot.setData(data);
    }
    if (this.plot.cursor.left < 0) this.showLatest();
    const figures = series.map(one => {
      const there = one.values.filter(value => value !== null);
      if (!there.length) return `${one.name} none`;
      return `${one.name} ${this.show(there.at(-1))} now, ${this.show(Math.max(...there))} at most`;
    });
    const drawn = this.plot.root.querySelector(".u-wrap"); // and not the legend, which is text
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", `${this.title}, five minutes: ${figures.join("; ")}`);
  }

  showLatest() {
    const last = this.plot.data[0].length - 1;
    if (last >= 0) this.plot.setLegend({ idx: last }, false);
  }

  options(series) {
    const axis = { stroke: colour("soft"), font: "11px system-ui", ticks: { show: false }, grid: { stroke: colour("rule"), width: 1 } };
    const time = seconds => clock(1000 * seconds);
    return {
      width: this.width(),
      height: CHART_HEIGHT,
      padding: [6, 18, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: this.group }, points: { size: 6 } },
      hooks: { setCursor: [plot => { if (plot.cursor.left < 0) this.showLatest(); }] },
      scales: { y: { range: (_, low, high) => [0, high > 0 ? 1.1 * high : 1] } },
      axes: [
        { ...axis, incrs: [60, 120], size: 26, values: (_, marks) => marks.map(mark => time(mark).slice(0, -3)) },
        { ...axis, size: 48, space: 34, values: (_, marks) => marks.map(mark => this.short(mark)) },
      ],
      series: [
        { label: "at", value: (_, seconds) => (seconds === null ? NOTHING : time(seconds)) },
        ...series.map(one => ({
          label: one.name,
          stroke: colour(one.colour),
          fill: one.fill ? `${colour(one.colour)}22` : undefined,
          width: 1.8,
          dash: one.dash,
          points: { show: false, size: 5, filter: (plot, at) => loneIndices(plot.data[at]) },
          value: (_, value) => (value === null || value === undefined ? NOTHING : this.show(value)),
        })),
      ],
    };
  }

  short(mark) {
    return mark >= 1000 ? `${+(mark / 1000).toFixed(1)}k` : `${+mark.toFixed(2)}`;
  }

  close() {
    this.sizes.disconnect();
    this.plot?.destroy();
  }
}
