// Models with what can be done to them, tenants with what their limits leave, and batches with how far they are.

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
    const count = (more.models ?? 0) + (more.loadable ?? 0);
    const left = count ? `${count} more are not shown.` : "";
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
    const unload = make("button", { type: "button", disabled });
    const say = (text) => {
      unload.textContent = text;
      unload.setAttribute("aria-label", `${text} ${name}`);
    };
    say("Unload");
    unload.onclick = ({ detail }) => {
      // Who clicks twice at once has not been asked in between.
      if (detail > 1) return;
      if (unload.textContent === "Unload") {
        say("Really unload");
        setTimeout(() => say("Unload"), DOUBT);
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

// A table that stays, of which those cells alone are made anew that tell something else: three times a second no text could
// be selected in another, nor would a phone stay where it was scrolled to.
class StayingTable {
  constructor(node, head, none) {
    Object.assign(this, { node, head, none });
    this.caption = null;
  }

  // Cells are texts; what is no text is made by a function, of what the cell tells.
  update(caption, rows) {
    if (!rows.length) {
      if (this.caption !== "") this.node.replaceChildren(make("p", { className: "quiet", textContent: this.none }));
      this.caption = "";
      return;
    }
    if (!this.caption) this.begin(caption);
    if (this.caption !== caption) this.title.textContent = this.caption = caption;
    for (const [at, row] of rows.entries()) this.fill(at, row);
    while (this.lines.length > rows.length) this.lines.pop().node.remove();
  }

  begin(caption) {
    const whole = table(caption, this.head, []);
    [this.title, , this.body] = whole.firstChild.children;
    this.caption = caption;
    this.lines = [];
    this.node.replaceChildren(whole);
  }

  fill(at, row) {
    if (at === this.lines.length) {
      const cells = row.map(() => make("td"));
      const node = make("tr", {}, ...cells);
      this.lines.push({ node, cells, told: [] });
      this.body.append(node);
    }
    const { cells, told } = this.lines[at];
    for (const [place, cell] of row.entries()) {
      const tells = typeof cell === "string" ? cell : JSON.stringify(cell.of);
      if (tells === told[place]) continue;
      told[place] = tells;
      cells[place].replaceChildren(typeof cell === "string" ? cell : cell.make(cell.of));
    }
  }
}

function limitsOf(left) {
  const parts = Object.entries(left).map(([name, [rest, of]]) => `${number(rest)} of ${number(of)} ${name.replaceAll("_", " ")}`);
  return parts.join(", ") || "no limits";
}

function tenantRow(each) {
  return [each.name ?? "the server's own key", number(each.running), number(each.waiting), number(each.ended),
    number(each.tokens), limitsOf(each.left)];
}

function progress({ id, total, completed, failed }) {
  const done = completed + failed;
  const bar = make("progress", total ? { max: total, value: done } : {});
  bar.setAttribute("aria-label", `How far ${id} is`);
  const some = failed ? `, ${number(failed)} failed` : "";
  const told = total === null ? "its lines are counted" : `${number(done)} of ${number(total)}${some}`;
  return make("span", { className: "row" }, bar, told);
}

function jobRow({ id, model, endpoint, state, tenant, total, completed, failed }) {
  return [id, model ?? "", endpoint, state, { of: { id, total, completed, failed }, make: progress }, tenant ?? ""];
}

const left = (count) => (count ? `; ${count} more are not shown` : "");

export class Tables {
  constructor() {
    this.models = new ModelRows(byId("models"));
    this.tenants = new StayingTable(byId("tenants"), ["name", "run", "wait", "ended in the last minute", "their tokens", "left"],
      "No key has been given out.");
    this.jobs = new StayingTable(byId("jobs"), ["id", "model", "route", "state", "lines", "tenant"], "No batch is under way.");
  }

  update(message) {
    const { keys, tenants, batches, more } = message;
    this.models.update(message);
    byId("tenants-part").hidden = !keys;
    if (keys) this.tenants.update(`Tenants, the busiest first${left(more.tenants)}`, tenants.map(tenantRow));
    this.jobs.update(`Batches that are not over${left(more.batches)}`, batches.map(jobRow));
  }
}
