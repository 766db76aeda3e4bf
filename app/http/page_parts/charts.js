// Charts of the last five minutes, drawn by uPlot in the page's colours. The legend shows the latest values.

const CHART_HEIGHT = 150;
const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Values between two gaps, which a line does not show.
function loneIndices(values) {
  return values.flatMap((value, at) => (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []));
}

class Chart {
  // `show` formats a value. The cursors of the charts in one `group` move together.
  constructor(title, show, group) {
    this.title = title;
    this.show = show;
    this.group = group;
    this.plot = null;
    this.place = element("div", { className: "plot" });
    this.nothing = element("p", { className: "soft" });
    this.node = element("figure", {}, element("h3", {}, title), this.nothing, this.place);
    this.sizes = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: CHART_HEIGHT }));
    this.sizes.observe(this.place);
  }

  width() {
    return Math.max(200, this.place.clientWidth);
  }

  // `series` has { name, colour, values, fill }. `times` are seconds on this machine's clock, one period apart.
  // A chart without values is one line, which says `nothing`.
  update(times, series, nothing) {
    const isEmpty = !series.some(one => one.values.some(Boolean));
    this.node.classList.toggle("empty", isEmpty);
    setText(this.nothing, isEmpty ? nothing : "");
    if (isEmpty) {
      this.plot?.destroy();
      this.plot = this.shape = null;
      return;
    }
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
    const drawn = this.plot.root.querySelector(".u-wrap"); // not the legend, which is text already
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
        { label: "time", value: (_, seconds) => (seconds === null ? NOTHING : time(seconds)) },
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
