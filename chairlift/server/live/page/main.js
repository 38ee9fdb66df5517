// The page's start: what is shown, and who hears of what.

import { Chat } from "./chat.js";
import { byId, onSchemeChange, tell } from "./dom.js";
import { Feed } from "./feed.js";
import { Panels } from "./panels.js";
import { key } from "./session.js";
import { Tables } from "./tables.js";
import { Waterfall } from "./waterfall.js";

const waterfall = new Waterfall();
const open = (id) => waterfall.open(id);
const say = (text) => { byId("bar-text").textContent = text; };
const tables = new Tables();
const chat = new Chat(open);
const feed = new Feed(onMessage, onState);
const panels = new Panels(byId("panels"), feed, say, open);
const still = matchMedia("(prefers-reduced-motion: reduce)");

function onMessage() {
  panels.update();
  tables.update(feed.message);
  if (still.matches) panels.draw();
}

// What is wrong, and what to do about it.
function onState(text, error) {
  tell(byId("status"), text);
  byId("status").dataset.state = text === "live" ? "ready" : error ? "failed" : "";
  byId("notice").hidden = error === null;
  if (!error) return;
  const asksForKey = error.status === 401 || error.code === "missing_right";
  byId("key-label").hidden = !asksForKey;
  byId("notice").querySelector("button").textContent = asksForKey ? "Use this key" : "Try again";
  const what = { 401: "This server asks for a key. To see what it does, the key needs the right admin; to chat, the right infer." };
  tell(byId("notice-text"), what[error.status] ?? (error.status ? error.message : `The server can't be reached (${error.message}).`));
}

byId("notice").addEventListener("submit", (event) => {
  event.preventDefault();
  try {
    if (!byId("key-label").hidden) key.set(byId("key").value.trim());
  } catch (error) {
    byId("notice-text").textContent = error.message;
    return;
  }
  feed.again();
  chat.refresh();
});

const tabs = ["live", "chat"];

function show(name) {
  for (const each of tabs) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  history.replaceState(null, "", name === "live" ? location.pathname : `#${name}`);
  if (name === "chat") chat.refresh();
}

for (const each of tabs) {
  byId(`tab-${each}`).onclick = () => show(each);
  byId(`tab-${each}`).onkeydown = (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(tabs.indexOf(each) + 1) % tabs.length];
    show(other);
    byId(`tab-${other}`).focus();
  };
}

// Pictures move between messages; what nobody sees is not drawn.
const FRAME = 66;
let drawn = 0;

function frame(moment) {
  if (feed.message && !still.matches && moment - drawn >= FRAME && !byId("live").hidden) {
    drawn = moment;
    panels.draw();
  }
  requestAnimationFrame(frame);
}

onSchemeChange(() => panels.inOtherLight());
addEventListener("hashchange", () => show(location.hash === "#chat" ? "chat" : "live"));
if (location.hash === "#chat") show("chat");
requestAnimationFrame(frame);
feed.run();
