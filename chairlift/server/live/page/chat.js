// The chat: a form, and the conversation, whose answers come as they are written.

import { Answer, thoughtOf } from "./answer.js";
import { byId, make, number, seconds } from "./dom.js";
import { ask, events } from "./session.js";

const CUT = "The call of a tool was cut off, so it is left out of the conversation.";
const valueOf = (id) => byId(id).value.trim();

// What a field with JSON has; empty is undefined. Throws what is wrong with it.
function jsonOf(id, name) {
  const text = valueOf(id);
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is no JSON: ${error.message}`);
  }
}

export class Chat {
  constructor(open) {
    this.open = open;
    this.messages = [];
    this.pending = [];
    this.stopping = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.stopping) this.send();
    });
    byId("chat-say").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("chat-form").requestSubmit();
      }
    });
    byId("chat-stop").onclick = () => this.stopping?.abort();
    byId("chat-clear").onclick = () => this.clear();
  }

  // The models that one can talk to; the choice stays.
  async refresh() {
    const select = byId("chat-model");
    const before = select.value;
    try {
      const { data } = await (await ask("v1/models")).json();
      const names = data.filter(({ task }) => task === "generate").map(({ id }) => id);
      select.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
      if (names.includes(before)) select.value = before;
      byId("chat-send").disabled = !names.length;
      if (!names.length) this.note("No language model is served: nobody is there to answer.");
    } catch (error) {
      this.note(error.message);
    }
  }

  get body() {
    const schema = jsonOf("chat-schema", "The JSON schema");
    const tools = jsonOf("chat-tools", "The list of tools");
    const system = valueOf("chat-system");
    const body = { model: byId("chat-model").value, stream: true, stream_options: { include_usage: true },
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages] };
    if (valueOf("chat-temperature")) body.temperature = Number(valueOf("chat-temperature"));
    if (valueOf("chat-tokens")) body.max_tokens = Number(valueOf("chat-tokens"));
    if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    if (tools !== undefined) body.tools = tools;
    if (byId("chat-logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return body;
  }

  // While calls of tools have no results, what is said is the next one's.
  async send() {
    const said = byId("chat-say").value;
    const call = this.pending[0];
    this.messages.push(call ? { role: "tool", tool_call_id: call.id, content: said } : { role: "user", content: said });
    let body;
    try {
      body = this.body;
    } catch (error) {
      this.messages.pop();
      this.note(error.message);
      return;
    }
    byId("chat-say").value = "";
    this.add(make("article", { className: "user" }, make("h3", { textContent: call ? `Result of ${call.name}` : "You" }),
      make("div", { className: "text", textContent: said })));
    this.pending.shift();
    if (!this.pending.length) await this.answer(body, call && { call, said });
    this.label();
  }

  // The last result of a tool can be given again where nothing came of it: else its call would never have one.
  async answer(body, result) {
    // A conversation that begins meanwhile has a list of its own.
    const messages = this.messages;
    const answer = new Answer(body.model);
    this.add(answer.node);
    this.busy(new AbortController());
    const began = performance.now();
    try {
      await this.read(await ask("v1/chat/completions", { body, signal: this.stopping.signal }), answer, began);
    } catch (error) {
      answer.foot.textContent = error.name === "AbortError" ? "stopped" : error.message;
      answer.foot.classList.toggle("problem", error.name !== "AbortError");
    }
    // To half a call there is no result, without which the conversation could not go on.
    const cut = !answer.hasWholeCalls;
    if (cut) answer.calls = [];
    // What had no answer is not part of the conversation.
    const came = answer.content || answer.thoughts || answer.calls.length;
    if (came) messages.push(answer.message);
    else messages.pop();
    if (messages === this.messages) {
      if (cut) this.note(CUT + (answer.reason === "length" ? " With more tokens it may come whole." : ""));
      const again = came ? null : result;
      this.pending = again ? [again.call] : answer.calls.filter(Boolean);
      if (again) byId("chat-say").value ||= again.said;
    }
    this.busy(null);
  }

  async read(stream, answer, began) {
    let first = null, usage = null, id = "";
    for await (const { data } of events(stream)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      id = chunk.id;
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) {
        answer.take(choice);
        const { delta } = choice;
        if (delta.content || delta.tool_calls || thoughtOf(delta)) first ??= performance.now();
      }
      answer.node.scrollIntoView({ block: "end" });
    }
    const long = (performance.now() - began) / 1000;
    const told = [answer.reason, usage && `${number(usage.completion_tokens)} tokens in ${seconds(long)}`,
      first && `the first after ${seconds((first - began) / 1000)}`].filter(Boolean);
    const link = make("button", { type: "button", className: "link", textContent: "what took how long" });
    link.onclick = () => this.open(id);
    answer.foot.replaceChildren(`${told.join(", ")}: `, link);
  }

  add(node) {
    byId("chat-log").append(node);
    node.scrollIntoView({ block: "end" });
  }

  note(text) {
    this.add(make("p", { className: "problem", textContent: text }));
  }

  busy(stopping) {
    this.stopping = stopping;
    byId("chat-log").setAttribute("aria-busy", String(stopping !== null));
    byId("chat-send").disabled = stopping !== null;
    byId("chat-stop").disabled = stopping === null;
  }

  label() {
    const call = this.pending[0];
    byId("chat-say-label").textContent = call ? `Result of ${call.name}(${call.arguments})` : "Message";
    byId("chat-say").focus();
  }

  clear() {
    this.stopping?.abort();
    this.messages = [];
    this.pending = [];
    // It belongs to a token that is gone.
    byId("probabilities").hidden = true;
    byId("chat-log").replaceChildren();
    this.label();
  }
}
