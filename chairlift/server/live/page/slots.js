// The slots of a model over the last minute: a row a slot, a bar a request, the present at the right.

import { colour, make, seconds } from "./dom.js";
import { SHOWN } from "./feed.js";

const MOST_ROWS = 256;
const HUES = 6;
const same = (bar, other) => bar !== null && other !== null && bar[0] === other[0] && bar[2] === other[2];
const rowHeight = (rows) => (rows <= 8 ? 18 : rows <= 16 ? 12 : rows <= 32 ? 8 : rows <= 64 ? 6 : 3);

function hueOf(id) {
  let sum = 0;
  for (const letter of id.slice(-12)) sum = (sum * 31 + letter.charCodeAt(0)) >>> 0;
  return sum % HUES;
}

// In words, for whoever points at a bar.
export function describe([id, slot, start, first, end, background, count, owner, reason], now, kind) {
  const long = seconds((end ?? now) - start);
  const whose = owner === null ? "" : ` of ${owner}`;
  const what = kind === "item" ? `call of ${count} (${id})` : `${id}${whose}`;
  const state = end !== null ? `${reason ?? "over"} after ${long}`
    : kind === "sequence" && first === null ? `its prompt is read, for ${long}` : `running for ${long}`;
  const read = first === null || first < start ? "" : `, first token after ${seconds(first - start)}`;
  return `slot ${slot + 1}: ${what}${background ? ", in the background" : ""}, ${state}${read}`;
}

export class SlotPicture {
  constructor(feed, say, open) {
    this.feed = feed;
    this.say = say;
    this.open = open;
    this.chosen = null;
    this.canvas = make("canvas", { className: "slots", tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.pointed = "";
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("click", (event) => this.show(this.barAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  update(model, title) {
    this.model = model;
    const { slots, kind } = model.look;
    let last = slots - 1;
    for (const bar of model.bars.values()) last = Math.max(last, bar[1]);
    this.rows = Math.min(last + 1, MOST_ROWS) || 1;
    this.height = rowHeight(this.rows);
    this.canvas.setAttribute("aria-label", `The ${slots} ${kind === "item" ? "instances" : "slots"} of ${title} over ` +
      "the last minute. Arrow keys choose a request, Enter opens it.");
  }

  draw() {
    const { canvas, rows, height } = this;
    const width = canvas.clientWidth;
    if (!this.model || !width) return;
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(rows * height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) {
      [canvas.width, canvas.height] = [wide, high];
      canvas.style.height = `${rows * height}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, rows * height);
    pen.fillStyle = colour("row");
    for (let row = 0; row < rows; row += 1) pen.fillRect(0, row * height, width, height - 1);
    const colours = Array.from({ length: HUES }, (_, hue) => colour(`bar-${hue}`));
    const [reading, background, bad, edge] = ["reading", "background", "bad", "text"].map(colour);
    for (const bar of this.model.bars.values()) {
      const [id, slot, , first, end, inBackground, , , reason] = bar;
      if (slot >= rows) continue;
      const [left, right] = this.span(bar, width);
      const top = slot * height;
      const whole = reason === "error" ? bad : inBackground ? background : colours[hueOf(id)];
      pen.fillStyle = whole;
      pen.fillRect(left, top, right - left, height - 1);
      if (this.model.look.kind === "sequence") {
        const until = first === null ? right : Math.min(this.x(first, width), right);
        pen.fillStyle = reading;
        if (until > left) pen.fillRect(left, top, until - left, height - 1);
      }
      if (end === null) {
        pen.fillStyle = edge;
        pen.fillRect(right - 2, top, 2, height - 1);
      }
      // Of a bar that has changed there is another array by now.
      if (same(bar, this.chosen)) {
        pen.strokeStyle = edge;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, top + 1, Math.max(right - left - 2, 1), Math.max(height - 3, 1));
      }
    }
  }

  x(moment, width) {
    return width * (1 - (this.feed.now - moment) / SHOWN);
  }

  span([, , start, , end], width) {
    const left = Math.max(this.x(start, width), 0);
    return [left, Math.max(end === null ? width : this.x(end, width), left + 1)];
  }

  barAt(event) {
    const { left, top, width } = this.canvas.getBoundingClientRect();
    const [x, slot] = [event.clientX - left, Math.floor((event.clientY - top) / this.height)];
    let found = null;
    for (const bar of this.model?.bars.values() ?? []) {
      const [from, to] = this.span(bar, width);
      if (bar[1] === slot && x >= from - 1 && x <= to + 1) found = bar;
    }
    return found;
  }

  // Where the page moves under a mouse that does not, keys go on from what they chose.
  point(event) {
    const pointed = `${event.screenX} ${event.screenY}`;
    if (pointed !== this.pointed) this.choose(this.barAt(event));
    this.pointed = pointed;
  }

  choose(bar) {
    if (bar === this.chosen) return;
    this.chosen = bar;
    if (bar) this.say(describe(bar, this.feed.now, this.model.look.kind));
    this.draw();
  }

  show(bar) {
    if (bar) this.open(bar[0]);
  }

  // Left and right follow time, up and down go to the nearest bar of another slot.
  onKey(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if ((!steps && event.key !== "Enter") || !this.model) return;
    // Else the same key would go on to the button that is in focus then, and close what it opens.
    event.preventDefault();
    if (!steps) return this.show(this.chosen);
    const bars = [...this.model.bars.values()].sort((one, other) => one[2] - other[2]);
    const known = bars.find((bar) => same(bar, this.chosen));
    if (!known) return this.choose(bars.at(-1) ?? null);
    const [rows, places] = steps;
    if (places) return this.choose(bars[bars.indexOf(known) + places] ?? known);
    const beyond = bars.filter((bar) => (bar[1] - known[1]) * rows > 0);
    const far = (bar) => Math.abs(bar[1] - known[1]) * SHOWN * 10 + Math.abs(bar[2] - known[2]);
    this.choose(beyond.reduce((best, bar) => (!best || far(bar) < far(best) ? bar : best), null) ?? known);
  }
}
