// What took a request how long, and what would have made it faster: a dialog over the page.

import { byId, make, seconds } from "./dom.js";
import { ask } from "./session.js";

const PHASES = [["queued_s", "waited", "wait"], ["prefill_s", "prompt read", "read"], ["decode_s", "answer written", "write"],
  ["run_s", "computed", "write"]];
const AGAIN = 700;

function phasesOf({ phases }) {
  const total = phases.total_s || Math.max(...PHASES.map(([name]) => phases[name] ?? 0)) || 1;
  let from = 0;
  const rows = [];
  for (const [name, words, kind] of PHASES) {
    const long = phases[name];
    if (long === undefined || long === null) continue;
    const bar = make("div", { className: `phase ${kind}` });
    bar.style.marginLeft = `${Math.min((100 * from) / total, 100)}%`;
    bar.style.width = `${Math.max(Math.min((100 * long) / total, 100 - (100 * from) / total), 0.5)}%`;
    rows.push(make("div", { className: "fall" }, make("span", { textContent: words }),
      make("div", { className: "track" }, bar), make("span", { textContent: seconds(long) })));
    from += long;
  }
  return make("div", { className: "waterfall" }, ...rows);
}

function moment(expected) {
  if (!expected) return null;
  const band = expected.early_s === null ? "" : ` (9 times in 10 in ${seconds(expected.early_s)} to ${seconds(expected.late_s)})`;
  return `in ${seconds(expected.in_s)}${band}`;
}

function factsOf(part) {
  const { predicted } = part;
  const tokens = part.prompt_tokens === null ? null : `${part.prompt_tokens} in the prompt` +
    (part.cached_tokens === null ? "" : `, ${part.cached_tokens} of them cached`) + `; ${part.tokens ?? 0} written`;
  const steps = part.steps ? `${part.steps}, with ${part.mean_batch} requests in each on average` : null;
  const facts = [["model", part.model], ["state", part.state.replaceAll("_", " ")], ["why", part.why], ["in detail", part.detail],
    ["place in the queue", part.position], ["tokens", tokens], ["steps", steps], ["computed together", part.steps ? null : part.mean_batch],
    ["preempted", part.preemptions ? `${part.preemptions} times` : null], ["starts", moment(predicted?.start)],
    ["first token", moment(predicted?.first_token)], ["ends", moment(predicted?.end)]];
  const list = make("dl");
  for (const [name, value] of facts) {
    if (value !== null && value !== undefined) list.append(make("dt", { textContent: name }), make("dd", { textContent: String(value) }));
  }
  return list;
}

function hintsOf({ hints }) {
  if (!hints.length) return [];
  const lines = hints.map(({ setting, text }) => make("li", { textContent: setting ? `${text} (${setting})` : text }));
  return [make("h3", { textContent: "What would have made it faster" }), make("ul", {}, ...lines)];
}

// What the twin makes of it, on request: that costs the server a simulation.
function whatIfOf(id) {
  const button = make("button", { type: "button", textContent: "Simulate what would have made it faster" });
  const said = make("p");
  said.setAttribute("role", "status");
  button.onclick = async () => {
    button.disabled = true;
    said.textContent = "It is simulated …";
    try {
      const { parts } = await (await ask(`v1/requests/${encodeURIComponent(id)}?what_if=true`)).json();
      const found = parts.find((part) => part.what_if)?.what_if;
      said.textContent = found?.text ?? "That can be told of requests that were answered.";
    } catch (error) {
      said.textContent = error.message;
    }
    button.disabled = false;
  };
  return [make("div", { className: "row" }, button), said];
}

export class Waterfall {
  constructor() {
    this.dialog = byId("request");
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
  }

  async open(id) {
    clearTimeout(this.timer);
    this.id = id;
    byId("request-title").textContent = id;
    byId("request-parts").replaceChildren(make("p", { textContent: "…" }));
    if (!this.dialog.open) this.dialog.showModal();
    await this.show(id);
  }

  // While it has not ended it is looked at again.
  async show(id) {
    let nodes, live = false;
    try {
      const { parts } = await (await ask(`v1/requests/${encodeURIComponent(id)}`)).json();
      live = parts.some((part) => part.state !== "ended");
      nodes = parts.flatMap((part) => [...(parts.length > 1 ? [make("h3", { textContent: part.id })] : []),
        phasesOf(part), factsOf(part), ...hintsOf(part)]);
      if (!live) nodes.push(...whatIfOf(id));
    } catch (error) {
      nodes = [make("p", { className: "problem", textContent: error.message })];
    }
    if (id !== this.id || !this.dialog.open) return;
    byId("request-parts").replaceChildren(...nodes);
    if (live) this.timer = setTimeout(() => this.show(id), AGAIN);
  }
}
