"""Has the live page's code run in Node, on elements that do no more than the page needs of them."""

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")

_IN_NODE = """
class Element {
  constructor() {
    Object.assign(this, { value: "", textContent: "", hidden: false, children: [], parent: null, listeners: {} });
    Object.assign(this, { attributes: {}, dataset: {}, style: { setProperty() {} }, classList: { toggle() {} } });
  }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Element) node.parent = this;
      this.children.push(node);
    }
  }
  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }
  remove() {
    this.parent.children.splice(this.parent.children.indexOf(this), 1);
  }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
  // Of what a search would find there is one, which stays the same.
  querySelector(what) { return (this.found ??= {})[what] ??= new Element(); }
  addEventListener(name, call) { this.listeners[name] = call; }
  setAttribute(name, value) { this.attributes[name] = value; }
  scrollIntoView() {}
  focus() {}
}
const nodes = {};
const stored = {};
globalThis.document = { createElement: () => new Element(), getElementById: (id) => (nodes[id] ??= new Element()) };
globalThis.matchMedia = () => new Element();
const setItem = (name, value) => { stored[name] = value; };
globalThis.sessionStorage = { getItem: (name) => stored[name] ?? null, setItem };
globalThis.fetch = async () => ({ ok: true });
globalThis.window = {};
globalThis.ResizeObserver = class { observe() {} };
// What a table or a line of one shows.
const shown = (node) => (node instanceof Element ? node.textContent || node.children.map(shown).join("|") : node);
"""


def in_node(script: str, folder: Path) -> Any:
    """What a module beside those of the page logs, as JSON."""
    for each in (resources.files("chairlift.server.live") / "page").iterdir():
        (folder / each.name).write_text(each.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "script.js").write_text(_IN_NODE + script)
    ended = subprocess.run(["node", "script.js"], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
