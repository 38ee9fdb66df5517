// Sliders for a model's settings, what its last minutes would have been like with them, and a button that sets them.

import { make, number, seconds, table } from "./dom.js";
import { ask } from "./session.js";

// How long nobody moves a slider before the server is asked.
const STILL = 400;
const COUNTS = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const TARGETS = [null, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000];
const WAITS = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const milliseconds = (value) => (value === null ? "none" : `${number(value)} ms`);

// By name: what it is in words, the values that can be tried, and how they are shown.
const SETTINGS = {
  max_num_seqs: ["Slots", COUNTS, String],
  batch_size: ["Slots", COUNTS, String],
  max_num_batched_tokens: ["Tokens in a step", [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], String],
  target_itl_ms: ["Target between tokens", TARGETS, milliseconds],
  max_wait_ms: ["Wait for company", WAITS, milliseconds],
  max_batch_size: ["Items in a call", COUNTS, String],
  target_latency_ms: ["Target for an answer", TARGETS, milliseconds],
};
const OF_ITEMS = ["max_batch_size", "max_wait_ms", "target_latency_ms"];
const OF_STRATEGY = {
  continuous: ["max_num_seqs", "max_num_batched_tokens", "target_itl_ms"],
  dynamic: ["batch_size", "max_num_batched_tokens", "max_wait_ms"],
  static: ["batch_size", "max_num_batched_tokens"],
  none: ["max_num_batched_tokens"],
};

const pair = (name, index) => (figures) => figures[name]?.[index] ?? null;
const ROWS = {
  sequence: [["First token, 50%", pair("ttft", 0), seconds], ["First token, 95%", pair("ttft", 1), seconds],
    ["Between tokens, 50%", pair("itl", 0), seconds], ["Between tokens, 95%", pair("itl", 1), seconds],
    ["Tokens a second", (figures) => figures.outputs_per_s, number]],
  item: [["Answer, 50%", pair("latency", 0), seconds], ["Answer, 95%", pair("latency", 1), seconds],
    ["Requests a second", (figures) => figures.requests_per_s, number], ["Items a second", (figures) => figures.outputs_per_s, number]],
};

// A range input over a scale of values, in which the present one is too.
class Slider {
  constructor(model, name, present, moved) {
    const [words, scale, show] = SETTINGS[name];
    this.values = [...new Set([...scale, present])].sort((a, b) => (a ?? -1) - (b ?? -1));
    this.input = make("input", { type: "range", min: 0, max: this.values.length - 1, step: 1, value: this.values.indexOf(present) });
    this.input.dataset.setting = name;
    this.shown = make("output");
    this.show = () => {
      this.shown.textContent = show(this.value);
      this.input.setAttribute("aria-valuetext", show(this.value));
    };
    this.input.setAttribute("aria-label", `${words} of ${model}`);
    this.input.oninput = () => {
      this.show();
      moved();
    };
    this.node = make("label", {}, `${words} `, this.input, this.shown);
    this.show();
  }

  get value() {
    return this.values[Number(this.input.value)];
  }
}

export class WhatIf {
  constructor(look) {
    this.model = look.name;
    this.kind = look.kind;
    this.path = `v1/models/${look.name.split("/").map(encodeURIComponent).join("/")}`;
    this.sliders = new Map();
    this.controls = make("div", { className: "sliders" });
    this.said = make("p", { className: "quiet" });
    this.said.setAttribute("role", "status");
    this.result = make("div");
    this.node = make("details", { className: "whatif" }, make("summary", { textContent: "What if" }), this.controls, this.said, this.result);
    this.node.addEventListener("toggle", () => {
      if (this.node.open) this.open();
      else this.stop();
    });
  }

  stop() {
    clearTimeout(this.timer);
    this.asking?.abort();
  }

  async open() {
    try {
      const { settings } = await (await ask(this.path)).json();
      if (!settings) throw new Error("The model has not been loaded.");
      this.present = settings;
      this.build();
      await this.forecast();
    } catch (error) {
      this.fail(error);
    }
  }

  build() {
    const parts = [];
    if (this.kind === "sequence") {
      this.strategy = make("select", {}, ...Object.keys(OF_STRATEGY).map((each) => make("option", { textContent: each })));
      this.strategy.value = this.present.strategy;
      this.strategy.onchange = () => {
        this.place();
        this.moved();
      };
      parts.push(make("label", {}, "Strategy ", this.strategy));
    }
    this.sliders = new Map();
    const names = this.kind === "sequence" ? [...new Set(Object.values(OF_STRATEGY).flat())] : OF_ITEMS;
    for (const name of names) {
      const slider = new Slider(this.model, name, this.present[name], () => this.moved());
      this.sliders.set(name, slider);
      parts.push(slider.node);
    }
    this.controls.replaceChildren(...parts);
    this.place();
  }

  // Those that the strategy reads.
  get names() {
    return this.kind === "sequence" ? OF_STRATEGY[this.strategy.value] : OF_ITEMS;
  }

  place() {
    for (const [name, slider] of this.sliders) slider.node.hidden = !this.names.includes(name);
  }

  // What is to be tried: all that differs, or all where the strategy does.
  get wanted() {
    const other = this.kind === "sequence" && this.strategy.value !== this.present.strategy;
    const wanted = other ? { strategy: this.strategy.value } : {};
    for (const name of this.names) {
      const { value } = this.sliders.get(name);
      if (other || value !== this.present[name]) wanted[name] = value;
    }
    // With a target the wait follows from it.
    if (this.kind === "item" && this.sliders.get("target_latency_ms").value !== null) delete wanted.max_wait_ms;
    return wanted;
  }

  moved() {
    this.stop();
    // What is shown is of other settings than those that are chosen now.
    this.result.replaceChildren();
    this.timer = setTimeout(() => this.forecast().catch((error) => this.fail(error)), STILL);
  }

  fail(error) {
    if (error.name === "AbortError") return;
    this.said.textContent = error.message;
    this.result.replaceChildren();
  }

  async forecast() {
    this.stop();
    this.asking = new AbortController();
    this.said.textContent = "The last minutes are simulated …";
    const { wanted } = this;
    const found = await (await ask(`${this.path}/forecast`, { body: wanted, signal: this.asking.signal })).json();
    this.said.textContent = this.about(found);
    const parts = [this.figures(found)];
    // Another strategy takes loading the model again.
    if (found.tried && wanted.strategy === undefined) parts.push(this.toApply(wanted));
    if (found.tried) parts.push(...this.toCopy(found));
    this.result.replaceChildren(...parts);
  }

  about({ measured, tried, seen, settings, window_s }) {
    const lines = [`${measured.requests} requests of the last ${window_s} s. The nearer the twin is to what was measured, the more its forecast is worth.`];
    if (tried?.refused) lines.push(`${tried.refused} of them would have been refused.`);
    const [most, what] = this.kind === "sequence" ? [seen.most_requests, "step"] : [seen.most_items, "call"];
    const slots = settings.tried?.max_num_seqs ?? settings.tried?.batch_size ?? settings.tried?.max_batch_size;
    if (slots > most) lines.push(`No ${what} held more than ${most}: beyond that the twin goes by the cost model.`);
    return lines.join(" ");
  }

  figures({ measured, now, tried }) {
    const columns = [measured, now, ...(tried ? [tried] : [])];
    const rows = ROWS[this.kind].map(([words, of, show]) => [words, ...columns.map((figures) => show(of(figures)))]);
    return table("What 50% and 95% are within", ["", "measured", "by the twin", ...(tried ? ["with these settings"] : [])], rows);
  }

  // What was simulated is set, and holds until the model is loaded again.
  toApply(wanted) {
    const apply = make("button", { type: "button", textContent: "Apply", className: "apply" });
    apply.onclick = async () => {
      apply.disabled = true;
      try {
        await ask(`${this.path}/settings`, { body: wanted });
        await this.open();
        this.said.textContent = `They hold from now on, until the model is loaded again. ${this.said.textContent}`;
      } catch (error) {
        apply.disabled = false;
        this.said.textContent = error.message;
      }
    };
    return make("div", { className: "row" }, apply);
  }

  toCopy({ flags, toml }) {
    if (!toml) return [];
    const lines = [make("p", { className: "quiet", textContent: "To have these settings from the start, serve with:" })];
    for (const text of [flags && `chairlift serve … ${flags}`, toml]) {
      if (!text) continue;
      const copy = make("button", { type: "button", textContent: "Copy" });
      const copied = text === toml ? toml : flags;
      copy.setAttribute("aria-label", `Copy ${copied}`);
      copy.onclick = async () => {
        await navigator.clipboard?.writeText(copied);
        copy.textContent = navigator.clipboard ? "Copied" : "Select it by hand";
      };
      lines.push(make("div", { className: "row copy" }, make("pre", { textContent: text }), copy));
    }
    return lines;
  }
}
