// A panel for each model: its state, the slots, and what it does in numbers.

import { Chart } from "./charts.js";
import { make, number, percent, seconds, tell } from "./dom.js";
import { titleOf } from "./feed.js";
import { SlotPicture } from "./slots.js";
import { WhatIf } from "./whatif.js";

const MOST_OPEN = 4;

const QUEUE = ["Requests", [["run", "bar-0", (look) => look.running], ["wait", "bar-1", (look) => look.waiting],
  ["in the background", "background", (look) => look.background_running + look.background_waiting]], number];
const of = (name, index) => (look) => look[name]?.[index] ?? null;
const quantiles = (name) => [["50%", "bar-2", of(name, 0)], ["95%", "bar-0", of(name, 1)], ["99%", "bar-1", of(name, 2)]];

const CHARTS = {
  sequence: [
    ["Tokens a second", [["to clients", "bar-0", (look) => look.written, true],
      ["computed, prompts too", "bar-2", (look) => look.computed]], number],
    QUEUE,
    ["KV memory", [["in use", "bar-0", (look) => share(look.kv, 1), true],
      ["and cached", "bar-2", (look) => share(look.kv, 2)]], percent],
    ["Time to first token", quantiles("ttft"), seconds],
    ["Time between tokens", quantiles("itl"), seconds],
  ],
  item: [
    ["Items a second", [["answered", "bar-0", (look) => look.written, true]], number],
    QUEUE,
    ["Busy", [["share of time", "bar-0", (look) => look.busy, true]], percent],
    ["Time in the queue", quantiles("queue_time"), seconds],
  ],
};

function share(kv, parts) {
  return kv ? kv.slice(0, parts).reduce((sum, each) => sum + each, 0) / kv[2] : null;
}

function rateOf({ written, limit, most }) {
  if (written === null) return "";
  const highest = most ? `, highest seen ${number(most)}` : "";
  return limit ? `${number(written)} of about ${number(limit)} with all slots taken` : `${number(written)}${highest}`;
}

// What a chart says in its heading, by its title.
const ABOUT = {
  "Tokens a second": rateOf,
  "Items a second": ({ written, batch }) => (written === null ? "" : number(written) + (batch ? `, ${number(batch)} in a call` : "")),
  Requests: (look) => `${look.running} run, ${look.waiting} wait`,
  "KV memory": ({ kv }) => kv ? `${percent(kv[0] / kv[2])} in use, ${percent(kv[1] / kv[2])} cached, ` +
    `${percent((kv[2] - kv[0] - kv[1]) / kv[2])} free` : "",
  "Time to first token": ({ ttft }) => ttft ? ttft.map(seconds).join(" / ") : "",
  "Time between tokens": ({ itl }) => itl ? itl.map(seconds).join(" / ") : "",
  "Time in the queue": (look) => look.queue_time ? look.queue_time.map(seconds).join(" / ") : "",
  Busy: ({ busy }) => busy === null ? "" : percent(busy),
};

class Panel {
  constructor(feed, look, say, open, isOpen) {
    this.title = make("span", { className: "name" });
    this.state = make("span", { className: "state" });
    this.problem = make("p", { className: "problem", hidden: true });
    this.queue = make("p", { className: "queue" });
    this.slots = new SlotPicture(feed, say, open);
    this.charts = CHARTS[look.kind].map((each) => new Chart(...each));
    this.whatIf = new WhatIf(look);
    this.node = make("details", { className: "panel", open: isOpen },
      make("summary", {}, this.title, " ", this.state), this.problem, this.slots.canvas, this.queue,
      make("div", { className: "charts" }, ...this.charts.map((chart) => chart.node)), this.whatIf.node);
  }

  update(model, title, now) {
    const { look } = model;
    tell(this.title, title);
    this.state.textContent = look.state === "ready" ? ABOUT.Requests(look) : look.state;
    this.state.dataset.state = look.state;
    // An older version has no routes of its own: what one would set there is the newest one's.
    this.whatIf.node.hidden = !look.newest;
    if (!look.newest) this.whatIf.stop();
    this.problem.hidden = !look.failure && look.state === "ready";
    this.problem.textContent = look.failure ?? { loading: "It is loading, and takes requests when it is done.",
      restarting: "Its worker ended, and another starts.", draining: "It finishes what it has, and takes no more." }[look.state] ?? "";
    const why = look.queue.map(([words, count]) => `${count} wait: ${words}`);
    this.queue.textContent = why.join("; ") || (model.bars.size ? "Nobody waits." : "No requests within the last minute.");
    if (!this.node.open) return;
    this.slots.update(model, title);
    for (const chart of this.charts) chart.update(model.past, now, ABOUT[chart.title](look));
  }

  close() {
    for (const chart of this.charts) chart.close();
    this.whatIf.stop();
    this.node.remove();
  }
}

export class Panels {
  constructor(node, feed, say, open) {
    Object.assign(this, { node, feed, say, open });
    this.panels = new Map();
  }

  update() {
    const { models, message } = this.feed;
    if (!this.panels.size) this.node.replaceChildren();
    for (const [name, panel] of this.panels) {
      if (!models.has(name)) {
        panel.close();
        this.panels.delete(name);
      }
    }
    for (const [name, model] of models) {
      if (!this.panels.has(name)) {
        const panel = new Panel(this.feed, model.look, this.say, this.open, this.panels.size < MOST_OPEN);
        this.panels.set(name, panel);
        this.node.append(panel.node);
      }
      this.panels.get(name).update(model, titleOf(model.look, models), message.now);
    }
    if (!models.size) this.node.replaceChildren(make("p", { className: "quiet", textContent: "No model is loaded." }));
  }

  draw() {
    for (const panel of this.panels.values()) if (panel.node.open) panel.slots.draw();
  }

  inOtherLight() {
    for (const panel of this.panels.values()) for (const chart of panel.charts) if (chart.plot) chart.build();
  }
}
