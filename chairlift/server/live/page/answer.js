// One answer of a model as it comes: its text, its reasoning, its calls of tools, and how likely each token was.

import { byId, make, percent } from "./dom.js";

const likely = (logprob) => Math.exp(logprob);
// What a chunk of the stream adds to the reasoning, if anything.
export const thoughtOf = ({ reasoning_content: thought, reasoning }) => thought ?? reasoning;

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

const shown = (token) => JSON.stringify(token).slice(1, -1).replaceAll(" ", "␣") || "(nothing)";

export class Answer {
  constructor(name) {
    this.text = make("div", { className: "text", tabIndex: -1 });
    this.reasoning = make("details", { hidden: true }, make("summary", { textContent: "reasoning" }), make("div", { className: "text" }));
    this.calls = [];
    this.callList = make("div");
    this.foot = make("p", { className: "quiet" });
    this.node = make("article", { className: "assistant" }, make("h3", { textContent: name }), this.reasoning, this.text,
      this.callList, this.foot);
    this.content = this.thoughts = "";
    // Why it ended, once it has.
    this.reason = null;
    this.text.addEventListener("mouseover", (event) => this.point(event.target));
    this.text.addEventListener("mouseleave", () => this.point(null));
    this.text.addEventListener("blur", () => this.point(null));
    this.text.addEventListener("keydown", (event) => this.onKey(event));
  }

  // One chunk of the stream.
  take({ delta, logprobs, finish_reason: reason }) {
    this.reason = reason ?? this.reason;
    const thought = thoughtOf(delta);
    if (thought) {
      this.thoughts += thought;
      this.reasoning.hidden = false;
      this.reasoning.lastChild.append(thought);
    }
    if (delta.content) this.write(delta.content, logprobs?.content ?? []);
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
  }

  write(text, tokens) {
    this.content += text;
    // Where text was held back it has other borders than the tokens, which then share a place.
    const fits = tokens.map(({ token }) => token).join("") === text;
    if (!tokens.length) this.text.append(text);
    else if (fits) for (const each of tokens) this.addToken(each.token, [each]);
    else this.addToken(text, tokens);
  }

  addToken(text, tokens) {
    const node = make("span", { className: "token", textContent: text });
    node.tokens = tokens;
    node.style.setProperty("--doubt", (1 - Math.min(...tokens.map(({ logprob }) => likely(logprob)))).toFixed(2));
    this.text.tabIndex = 0;
    this.text.append(node);
  }

  takeCall({ index, id, function: called }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
    this.callList.replaceChildren(...this.calls.filter(Boolean).map((each) => make("pre", { textContent: `${each.name}(${each.arguments})` })));
  }

  // Whether all calls came to their ends: of an answer that was cut off, the last one may have half its arguments.
  get hasWholeCalls() {
    return this.reason === "tool_calls" || this.calls.filter(Boolean).every((each) => isJson(each.arguments));
  }

  // As a message of the conversation.
  get message() {
    const calls = this.calls.filter(Boolean).map((each) => ({ id: each.id, type: "function", function: { name: each.name, arguments: each.arguments } }));
    return { role: "assistant", content: this.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  point(node) {
    const box = byId("probabilities");
    box.hidden = !node?.tokens;
    if (box.hidden) return;
    const rows = node.tokens.flatMap((each) => {
      const others = (each.top_logprobs ?? []).filter(({ token }) => token !== each.token);
      return [make("b", { textContent: `${shown(each.token)} ${percent(likely(each.logprob))}` }),
        ...others.map(({ token, logprob }) => make("span", { textContent: `${shown(token)} ${percent(likely(logprob))}` }))];
    });
    box.replaceChildren(...rows);
    const { left, bottom } = node.getBoundingClientRect();
    box.style.left = `${Math.min(left, innerWidth - box.offsetWidth - 8)}px`;
    box.style.top = `${bottom + 4}px`;
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const tokens = [...this.text.querySelectorAll(".token")];
    if (!step || !tokens.length) return;
    event.preventDefault();
    const at = tokens.findIndex((node) => node.classList.contains("chosen"));
    const next = tokens[Math.min(Math.max(at + step, 0), tokens.length - 1)];
    tokens[at]?.classList.remove("chosen");
    next.classList.add("chosen");
    this.point(next);
  }
}
