// What the server tells, message by message, and what follows from it: bars by model, and the last minute's numbers.

import { ask, events } from "./session.js";

export const SHOWN = 60;
// Of bars that have ended the server shows so many of a model.
const MOST_ENDED = 1000;
const PAUSE = 2000;
// Messages come three times a second: after so long without one none will come on this connection.
const SILENCE = 5000;

// What a model is called: its name, and its version where there is another of that name.
export function titleOf({ name, version }, models) {
  const others = [...models.values()].some(({ look }) => look.name === name && look.version !== version);
  return others ? `${name}, version ${version}` : name;
}

// One model of the server. A bar is [id, slot, start, first token, end, background, count, owner, finish reason].
class Model {
  constructor() {
    this.bars = new Map();
    this.past = [];
  }

  take(look, now, full) {
    this.look = look;
    if (full) this.bars.clear();
    // After a reboot the server's clock begins anew.
    if (full) this.past = this.past.filter(([then]) => then <= now);
    for (const bar of look.bars) this.bars.set(`${bar[0]} ${bar[2]}`, bar);
    this.forget(now);
    this.past.push([now, look]);
    while (this.past[0][0] < now - SHOWN) this.past.shift();
  }

  forget(now) {
    const ended = [];
    for (const [name, bar] of this.bars) {
      if (bar[4] === null) continue;
      if (bar[4] < now - SHOWN) this.bars.delete(name);
      else ended.push([bar[4], name]);
    }
    if (ended.length <= MOST_ENDED) return;
    ended.sort(([one], [other]) => one - other);
    for (const [, name] of ended.slice(0, -MOST_ENDED)) this.bars.delete(name);
  }
}

export class Feed {
  constructor(onMessage, onState) {
    this.models = new Map();
    this.message = null;
    this.onMessage = onMessage;
    this.onState = onState;
    this.running = false;
    this.woken = () => {};
  }

  // The server's clock at this moment.
  get now() {
    return this.message.now + (performance.now() - this.heard) / 1000;
  }

  // Try at once, and not only after the pause.
  again() {
    this.woken();
  }

  async run() {
    for (;;) {
      await this.listen();
      await new Promise((done) => {
        this.woken = done;
        setTimeout(done, PAUSE);
      });
    }
  }

  // One stream, to its end.
  async listen() {
    const silence = new AbortController();
    let timer;
    const expect = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE);
    };
    try {
      expect();
      for await (const { name, data } of events(await ask("v1/live", { signal: silence.signal }))) {
        // No failure: the server ends a stream that has lasted for as long as a request may.
        if (name !== "message") break;
        expect();
        this.take(JSON.parse(data));
      }
      this.onState("the stream ended, connecting again", null);
    } catch (error) {
      if (silence.signal.aborted) this.onState("nothing comes, connecting again", null);
      else this.onState("not connected", error);
    } finally {
      clearTimeout(timer);
    }
  }

  take(message) {
    this.heard = performance.now();
    this.message = message;
    const here = new Set();
    for (const look of message.models) {
      const name = `${look.name} ${look.version}`;
      here.add(name);
      if (!this.models.has(name)) this.models.set(name, new Model());
      this.models.get(name).take(look, message.now, message.full);
    }
    for (const name of this.models.keys()) if (!here.has(name)) this.models.delete(name);
    this.onState("live", null);
    this.onMessage();
  }
}
