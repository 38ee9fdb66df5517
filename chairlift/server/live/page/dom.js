// What all parts of the page are made with. Texts of others go through textContent alone: none can become markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Write a text where it is another one: what is written anew is read out anew, and can't be selected.
export function tell(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A table of rows, each a list of texts or nodes.
export function table(caption, head, rows) {
  const line = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell ?? "")));
  return make("div", { className: "scroll" }, make("table", {}, ...(caption ? [make("caption", { textContent: caption })] : []),
    make("thead", {}, line(head, "th")), make("tbody", {}, ...rows.map((row) => line(row, "td")))));
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  // Rounding first: of two digits, 99.5 would be written as 1.0e+2, and 9999.5 without its comma.
  const whole = Math.sign(value) * Math.round(size);
  if (Math.abs(whole) >= 10000) return whole.toLocaleString("en");
  if (size >= 99.5 || size < 1e-6 || Number.isInteger(value)) return String(whole);
  return value.toPrecision(2);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-6) return "0 ms";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 9.995 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export const percent = (share) => `${Math.round(100 * share)}%`;

// A colour of the style sheet, as it is in the present light or dark.
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const dark = matchMedia("(prefers-color-scheme: dark)");

export function onSchemeChange(call) {
  dark.addEventListener("change", call);
}
