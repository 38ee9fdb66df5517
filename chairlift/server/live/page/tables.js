// Models with what can be done to them, tenants with what their limits leave, and batch jobs with how far they are.

import { byId, make, number, table } from "./dom.js";
import { ask } from "./session.js";

// How long "Unload" asks whether it is meant.
const DOUBT = 4000;

// The buttons are there as long as their rows: a table that is made anew three times a second can't be clicked.
class ModelRows {
  constructor(node) {
    this.node = node;
    this.shown = "";
    this.busy = new Map();
  }

  update({ models, loadable, control, more }) {
    const rows = [...models.map(({ name, version, task, state, failure }) => [name, version, task, state, failure]),
      ...loadable.map((name) => [name, "", null, "not loaded", null])];
    const wanted = JSON.stringify([rows, control, more, [...this.busy]]);
    if (wanted === this.shown) return;
    this.shown = wanted;
    this.last = { models, loadable, control, more };
    const lines = rows.map(([name, version, task, state, failure]) => [name, version, task ?? "",
      this.busy.get(name) ?? (failure ? `${state}: ${failure}` : state), control ? this.buttons(name, state) : ""]);
    const left = more.models ? `${more.models} more are not shown.` : "";
    this.node.replaceChildren(lines.length ? table(left, ["name", "version", "does", "state", ""], lines)
      : make("p", { className: "quiet", textContent: "No model is served." }));
    if (!control) {
      const how = "Models are loaded and unloaded here where model_control is on, or with a key that has the right admin.";
      this.node.append(make("p", { className: "quiet", textContent: how }));
    }
  }

  buttons(name, state) {
    const disabled = this.busy.get(name)?.endsWith("…") ?? false;
    if (state === "not loaded") return this.button("Load", name, "load", disabled);
    const unload = make("button", { type: "button", textContent: "Unload", disabled });
    unload.setAttribute("aria-label", `Unload ${name}`);
    unload.onclick = () => {
      if (unload.textContent === "Unload") {
        unload.textContent = "Really unload";
        setTimeout(() => { unload.textContent = "Unload"; }, DOUBT);
      } else {
        this.change(name, "unload");
      }
    };
    return make("span", { className: "row" }, this.button("Reload", name, "load", disabled), unload);
  }

  button(text, name, what, disabled) {
    const node = make("button", { type: "button", textContent: text, disabled });
    node.setAttribute("aria-label", `${text} ${name}`);
    node.onclick = () => this.change(name, what);
    return node;
  }

  async change(name, what) {
    this.busy.set(name, `${what}ing…`);
    this.update(this.last);
    try {
      const path = name.split("/").map(encodeURIComponent).join("/");
      await ask(`v2/repository/models/${path}/${what}`, { body: {} });
      this.busy.delete(name);
    } catch (error) {
      this.busy.set(name, error.message);
      setTimeout(() => this.busy.delete(name), 4 * DOUBT);
    }
    this.shown = "";
  }
}

function limitsOf(left) {
  const parts = Object.entries(left).map(([name, [rest, of]]) => `${number(rest)} of ${number(of)} ${name.replaceAll("_", " ")}`);
  return parts.join(", ") || "no limits";
}

function showTenants({ keys, tenants, more }) {
  byId("tenants-part").hidden = !keys;
  if (!keys) return;
  const left = more.tenants ? `; ${more.tenants} more are not shown` : "";
  const rows = tenants.map((each) => [each.name ?? "the server's own key", number(each.running), number(each.waiting),
    number(each.ended), number(each.tokens), limitsOf(each.left)]);
  byId("tenants").replaceChildren(rows.length
    ? table(`Tenants, the busiest first${left}`, ["name", "run", "wait", "ended in the last minute", "their tokens", "left"], rows)
    : make("p", { className: "quiet", textContent: "No key has been given out." }));
}

function showJobs({ batches, more }) {
  const rows = batches.map((each) => {
    const done = each.completed + each.failed;
    const bar = make("progress", each.total ? { max: each.total, value: done } : {});
    bar.setAttribute("aria-label", `How far ${each.id} is`);
    const failed = each.failed ? `, ${number(each.failed)} failed` : "";
    const told = each.total === null ? "its lines are counted" : `${number(done)} of ${number(each.total)}${failed}`;
    return [each.id, each.model ?? "", each.endpoint, each.state, make("span", { className: "row" }, bar, told), each.tenant ?? ""];
  });
  const left = more.batches ? `; ${more.batches} more are not shown` : "";
  byId("jobs").replaceChildren(rows.length
    ? table(`Batches that are not over${left}`, ["id", "model", "route", "state", "lines", "tenant"], rows)
    : make("p", { className: "quiet", textContent: "No batch is under way." }));
}

export class Tables {
  constructor() {
    this.models = new ModelRows(byId("models"));
  }

  update(message) {
    this.models.update(message);
    showTenants(message);
    showJobs(message);
  }
}
