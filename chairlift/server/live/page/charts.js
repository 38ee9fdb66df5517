// Numbers of the last minute as lines, by uPlot.

import { colour, make } from "./dom.js";
import { SHOWN } from "./feed.js";

const { uPlot } = window;
const HEIGHT = 130;

export class Chart {
  // `lines` are [label, colour's name, what to read of a look, whether filled].
  constructor(title, lines, format) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.box = make("div", { className: "plot" });
    this.heading = make("h4", { textContent: title });
    this.node = make("figure", {}, this.heading, this.box);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.box);
  }

  // The plot itself is made once its place has a width, and anew in other light.
  build() {
    this.plot?.destroy();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    const value = (_, raw) => (raw === null || raw === undefined ? "–" : this.format(raw));
    this.plot = new uPlot({
      width: this.box.clientWidth,
      height: HEIGHT,
      cursor: { drag: { x: false, y: false } },
      scales: {
        x: { time: false, range: [-SHOWN, 0] },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] },
      },
      axes: [
        { ...axis, size: 22, values: (_, at) => at.map((each) => (each ? `${each} s` : "now")) },
        { ...axis, size: 56, values: (_, at) => at.map(this.format) },
      ],
      series: [
        { label: "at", value: (_, raw) => (raw === null ? "–" : `${Math.round(raw)} s`) },
        ...this.lines.map(([label, name, , filled]) => ({
          label,
          value,
          stroke: colour(name),
          fill: filled ? colour(name) + "44" : undefined,
          width: 1.5,
          points: { show: false },
        })),
      ],
    }, this.data ?? [[], ...this.lines.map(() => [])], this.box);
  }

  resize() {
    const width = this.box.clientWidth;
    if (!width) return;
    if (!this.plot) this.build();
    else if (width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  update(past, now, about) {
    this.data = [past.map(([then]) => then - now), ...this.lines.map(([, , read]) => past.map(([, look]) => read(look)))];
    this.heading.textContent = about ? `${this.title}: ${about}` : this.title;
    this.plot?.setData(this.data);
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}
