"""What the live page's code does by itself: the conversation, the connection to the server, tables and numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.page_code import in_node, needs_node

pytestmark = needs_node

CHAT = """
const { Chat } = await import("./chat.js");
const chat = new Chat();
const say = (text) => {
  nodes["chat-say"].value = text;
  return chat.send();
};
"""


def test_a_new_conversation_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    said = in_node(
        CHAT
        + """
        chat.read = async (stream, answer) => {
          Object.assign(answer, { content: "half of it", calls: [{ id: "1", name: "f", arguments: "" }] });
          chat.clear();
          throw new DOMException("", "AbortError");
        };
        nodes.probabilities = Object.assign(new Element(), { hidden: false });
        await say("hello");
        console.log(JSON.stringify([chat.messages, chat.pending, chat.stopping, nodes.probabilities.hidden]));
        """,
        tmp_path,
    )
    assert said == [[], [], None, True]


def test_probabilities_go_with_the_focus(tmp_path: Path) -> None:
    hidden = in_node(
        """
        const { Answer } = await import("./answer.js");
        const answer = new Answer("m");
        document.getElementById("probabilities").hidden = false;
        answer.text.listeners.blur();
        console.log(JSON.stringify(nodes.probabilities.hidden));
        """,
        tmp_path,
    )
    assert hidden


REFUSED = (
    """globalThis.fetch = async () => ({ ok: false, status: 429, text: async () => '{"error":{"message":"full"}}' });"""
)
STOPPED = """globalThis.fetch = async () => { throw new DOMException("", "AbortError"); };"""


@pytest.mark.parametrize("failure", [REFUSED, STOPPED], ids=["refused", "stopped"])
def test_a_tool_s_last_result_can_be_given_again_where_nothing_came_of_it(failure: str, tmp_path: Path) -> None:
    messages, pending, text, sent = in_node(
        CHAT
        + failure
        + """
        const calls = [{ id: "1", name: "weather", arguments: "A" }, { id: "2", name: "weather", arguments: "B" }];
        chat.messages = [{ role: "user" }, { role: "assistant", tool_calls: calls }];
        chat.pending = [...calls];
        await say("sunny");
        await say("rainy");
        const after = [chat.messages.slice(2), [...chat.pending], nodes["chat-say"].value];
        const sent = [];
        globalThis.fetch = async (path, { body }) => {
          sent.push(...JSON.parse(body).messages.slice(2));
          throw new Error("down");
        };
        await chat.send();
        console.log(JSON.stringify([...after, sent]));
        """,
        tmp_path,
    )
    sunny = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    assert (messages, text) == ([sunny], "rainy")
    assert [call["id"] for call in pending] == ["2"]
    assert sent == [sunny, {"role": "tool", "tool_call_id": "2", "content": "rainy"}]


def test_who_says_something_in_vain_begins_no_result(tmp_path: Path) -> None:
    said = in_node(
        CHAT
        + REFUSED
        + """
        await say("hello");
        console.log(JSON.stringify([chat.messages, chat.pending]));
        """,
        tmp_path,
    )
    assert said == [[], []]


# A stream of these choices, one a chunk.
ANSWERED = """
const chunk = (choice) => `data: ${JSON.stringify({ id: "x", choices: [choice] })}\\n\\n`;
const answered = (...choices) => async () => ({ ok: true, body: new Blob(choices.map(chunk)).stream() });
"""


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_an_answer_of_reasoning_alone_is_one(field: str, tmp_path: Path) -> None:
    messages, log = in_node(
        CHAT
        + ANSWERED
        + f"""
        globalThis.fetch = answered({{ delta: {{ {field}: "Well" }} }}, {{ delta: {{}}, finish_reason: "length" }});
        await say("hello");
        console.log(JSON.stringify([chat.messages, shown(nodes["chat-log"])]));
        """,
        tmp_path,
    )
    assert messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ""}]
    assert "length, the first after" in log


@pytest.mark.parametrize(
    ("given", "reason", "kept"),
    [
        ('{"city": "Be', "length", False),
        ("", "stop", False),
        ('{"city": "Be', None, False),
        ('{"city": "Bern"}', "length", True),
        ('{"city": "Bern"}', "stop", True),
        ("", "tool_calls", True),
    ],
)
def test_a_call_that_was_cut_off_asks_for_no_result(given: str, reason: str | None, kept: bool, tmp_path: Path) -> None:
    call = {"index": 0, "id": "1", "function": {"name": "weather", "arguments": given}}
    choice = {"delta": {"content": "I look.", "tool_calls": [call]}, "finish_reason": reason}
    pending, said, log = in_node(
        CHAT
        + ANSWERED
        + f"""
        globalThis.fetch = answered({json.dumps(choice)});
        await say("hello");
        console.log(JSON.stringify([chat.pending.length, chat.messages[1], shown(nodes["chat-log"])]));
        """,
        tmp_path,
    )
    assert (pending, "tool_calls" in said, "was cut off" in log) == (int(kept), kept, not kept)
    assert said["content"] == "I look."


def test_the_past_of_a_machine_that_was_started_anew_is_forgotten(tmp_path: Path) -> None:
    said = in_node(
        """
        const { Feed } = await import("./feed.js");
        const feed = new Feed(() => {}, () => {});
        const told = ([now, full]) => {
          feed.take({ now, full, models: [{ name: "m", version: "1", bars: [] }] });
          return feed.models.get("m 1").past.map(([then]) => then);
        };
        const moments = [[1000, true], [1001, false], [1002, true], [5, true], [6, false]];
        console.log(JSON.stringify(moments.map(told)));
        """,
        tmp_path,
    )
    assert said == [[1000], [1000, 1001], [1000, 1001, 1002], [5], [5, 6]]


def test_of_bars_that_ended_the_oldest_are_dropped(tmp_path: Path) -> None:
    """A model of short calls has many thousands within a minute, and the server shows no more of them."""
    count, first, live = in_node(
        """
        const { Feed } = await import("./feed.js");
        const feed = new Feed(() => {}, () => {});
        for (let message = 0; message < 5; message += 1) {
          const barOf = (_, at) => [`${message} ${at}`, 0, 1, null, 90 + message + at / 1e3];
          const bars = Array.from({ length: 300 }, barOf);
          if (!message) bars.push(["live", 0, 1, null, null]);
          feed.take({ now: 100, full: false, models: [{ name: "m", version: "1", bars }] });
        }
        const { bars } = feed.models.get("m 1");
        const ended = [...bars.values()].filter((bar) => bar[4] !== null).map((bar) => bar[4]);
        console.log(JSON.stringify([ended.length, Math.min(...ended), bars.has("live 1")]));
        """,
        tmp_path,
    )
    assert (count, first, live) == (1000, 91.2, True)


# The connection

# A stream of these lines, that goes on until it is given up. Timers go off when they are told to.
LISTENING = """
const timers = new Map();
let serial = 0;
globalThis.setTimeout = (call) => { timers.set(++serial, call); return serial; };
globalThis.clearTimeout = (number) => timers.delete(number);
const streamOf = (lines, ends) => async (path, { signal }) => ({ ok: true, body: new ReadableStream({
  start(controller) {
    controller.enqueue(new TextEncoder().encode(lines));
    if (ends) controller.close();
    signal?.addEventListener("abort", () => controller.error(signal.reason));
  },
}) });
const { Feed } = await import("./feed.js");
const states = [];
const feed = new Feed(() => {}, (text, error) => states.push([text, error === null]));
const turn = () => new Promise((done) => setImmediate(done));
const settled = async () => { for (let turns = 0; turns < 100; turns += 1) await turn(); };
const WORD = 'data: {"now": 1, "full": true, "models": []}\\n\\n';
"""


@pytest.mark.parametrize("ends", ["true", "false"])
def test_a_stream_that_the_server_ends_is_no_failure(ends: str, tmp_path: Path) -> None:
    """Neither where it only ends, nor where the server says that it lasted for as long as a request may."""
    last = "''" if ends == "true" else r"""'event: error\ndata: {"message": "it took more than 600 s"}\n\n'"""
    states, left = in_node(
        LISTENING
        + f"""
        globalThis.fetch = streamOf(WORD + {last}, {ends});
        feed.run();
        await settled();
        console.log(JSON.stringify([states, timers.size]));
        """,
        tmp_path,
    )
    assert states == [["live", True], ["the stream ended, connecting again", True]]
    assert left == 1, "the pause, and nobody waits for a message any more"


def test_a_server_that_says_nothing_any_more_is_not_called_live(tmp_path: Path) -> None:
    running, states, after = in_node(
        LISTENING
        + """
        globalThis.fetch = streamOf(WORD + WORD, false);
        feed.run();
        const goOff = async () => {
          await settled();
          const running = [...timers.values()];
          timers.clear();
          for (const call of running) call();
          await settled();
          return running.length;
        };
        const running = await goOff();
        const silent = [...states];
        await goOff();
        console.log(JSON.stringify([running, silent, states.slice(silent.length)]));
        """,
        tmp_path,
    )
    assert running == 1, "each message takes the place of the one before"
    assert states == [["live", True], ["live", True], ["nothing comes, connecting again", True]]
    assert after == [["live", True], ["live", True]], "by another connection"


def test_a_server_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    states = in_node(
        LISTENING
        + """
        globalThis.fetch = async () => { throw new TypeError("fetch failed"); };
        feed.run();
        await settled();
        console.log(JSON.stringify(states));
        """,
        tmp_path,
    )
    assert states == [["not connected", False]]


# The whole page, of which timers never go off and nothing is drawn.
PAGE = """
Object.assign(globalThis, { addEventListener() {}, requestAnimationFrame() {}, setTimeout() {} });
globalThis.location = { hash: "" };
const turn = () => new Promise((done) => setImmediate(done));
"""


def test_a_stream_that_ended_is_followed_by_another_without_alarm(tmp_path: Path) -> None:
    told = in_node(
        PAGE
        + """
        globalThis.fetch = async () => ({ ok: true, body: new Blob([""]).stream() });
        await import("./main.js");
        while (!nodes.status?.textContent) await turn();
        console.log(JSON.stringify([nodes.status.textContent, nodes.status.dataset.state, nodes.notice.hidden]));
        process.exit(0);
        """,
        tmp_path,
    )
    assert told == ["the stream ended, connecting again", "", True]


def test_a_key_that_can_not_be_sent_is_refused_where_it_is_given(tmp_path: Path) -> None:
    """Else the browser sends nothing, and the server would seem not to be there."""
    quiet, asked, wrong, kept, right = in_node(
        PAGE
        + """
        globalThis.fetch = async () => ({ ok: false, status: 401, text: async () => '{"error":{"message":"no"}}' });
        await import("./main.js");
        while (!nodes["notice-text"]) await turn();
        const give = (text) => {
          document.getElementById("key").value = text;
          nodes.notice.listeners.submit({ preventDefault() {} });
        };
        const asked = nodes["notice-text"].textContent;
        give("clk_abc…");
        const [wrong, kept] = [nodes["notice-text"].textContent, Object.keys(stored)];
        give(" clk_abc ");
        console.log(JSON.stringify([nodes.status.dataset.state, asked, wrong, kept, Object.values(stored)]));
        process.exit(0);
        """,
        tmp_path,
    )
    assert quiet == "failed"
    assert asked.startswith("This server asks for a key.")
    assert wrong.startswith("This is no key")
    assert (kept, right) == ([], ["clk_abc"])


def test_what_is_read_out_is_written_only_where_it_changes(tmp_path: Path) -> None:
    asked, written = in_node(
        PAGE
        + """
        const written = [];
        for (const id of ["status", "notice-text"]) {
          let text = "";
          const set = (value) => { text = value; written.push([id, value]); };
          Object.defineProperty(document.getElementById(id), "textContent", { get: () => text, set });
        }
        const nothing = { models: [], loadable: [], tenants: [], batches: [], more: {}, keys: false, control: false };
        const word = `data: ${JSON.stringify({ now: 1, full: true, ...nothing })}\n\n`;
        const full = { ok: false, status: 500, text: async () => '{"error":{"message":"no"}}' };
        let asked = 0;
        globalThis.fetch = async (path) => {
          if (path !== "v1/live") return { ok: true, json: async () => ({ data: [] }) };
          asked += 1;
          return asked > 1 ? full : { ok: true, body: new Blob([word, word]).stream() };
        };
        await import("./main.js");
        while (!nodes.status.textContent.startsWith("the stream ended")) await turn();
        for (const tries of [2, 3]) {
          await turn();
          nodes.notice.listeners.submit({ preventDefault() {} });
          for (let turns = 0; turns < 100 || asked < tries; turns += 1) await turn();
        }
        console.log(JSON.stringify([asked, written]));
        process.exit(0);
        """,
        tmp_path,
    )
    assert asked == 3
    assert written == [
        ["status", "live"],
        ["status", "the stream ended, connecting again"],
        ["status", "not connected"],
        ["notice-text", "no"],
    ]


# What is shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (0, "0"),
        (0.04, "0.040"),
        (1e-9, "0"),
        (7, "7"),
        (9.94, "9.9"),
        (9.96, "10"),
        (99.4, "99"),
        (99.5, "100"),
        (99.99, "100"),
        (-99.7, "-100"),
        (-150.5, "-151"),
        (9999.4, "9999"),
        (9999.7, "10,000"),
        (-12345.6, "-12,346"),
    ],
)
def test_numbers_are_short_and_never_powers_of_ten(value: Any, text: str, tmp_path: Path) -> None:
    script = f"""
    const {{ number }} = await import("./dom.js");
    console.log(JSON.stringify(number({"null" if value is None else value})));
    """
    assert in_node(script, tmp_path) == text


DRAWN = """
globalThis.devicePixelRatio = 1;
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
"""


def test_an_idle_server_has_axes_that_can_be_read(tmp_path: Path) -> None:
    ranges, texts = in_node(
        DRAWN
        + """
        let scales;
        window.uPlot = class { constructor(options) { ({ scales } = options); } };
        const { Chart } = await import("./charts.js");
        const { seconds } = await import("./dom.js");
        const chart = new Chart("Latency", [], seconds);
        chart.box.clientWidth = 100;
        chart.resize();
        const ranges = [0, null, 2].map((high) => scales.y.range(null, 0, high));
        console.log(JSON.stringify([ranges, [0, 2.5e-10, 0.0005, 0.2, 2].map(seconds)]));
        """,
        tmp_path,
    )
    assert ranges == [[0, 1], [0, 1], [0, 2.2]]
    assert texts == ["0 ms", "0 ms", "0.50 ms", "200 ms", "2.00 s"]


def test_a_chosen_bar_stays_chosen_when_it_changes(tmp_path: Path) -> None:
    outlined = in_node(
        DRAWN
        + """
        const { SlotPicture } = await import("./slots.js");
        let outlined = 0;
        const pen = new Proxy({}, { get: (_, name) => () => { outlined += name === "strokeRect"; }, set: () => true });
        const picture = new SlotPicture({ now: 10 }, () => {}, () => {});
        Object.assign(picture.canvas, { clientWidth: 600, getContext: () => pen });
        const told = (end) => {
          const bars = ["a", "b"].map((id, slot) => [`${id} 5`, [id, slot, 5, null, end, false, 1, null, null]]);
          return { look: { slots: 2, kind: "sequence" }, bars: new Map(bars) };
        };
        const before = told(null);
        picture.update(before, "m");
        picture.choose(before.bars.get("a 5"));
        picture.update(told(9), "m");
        outlined = 0;
        picture.draw();
        console.log(JSON.stringify(outlined));
        """,
        tmp_path,
    )
    assert outlined == 1


def test_what_is_applied_is_what_was_simulated(tmp_path: Path) -> None:
    cleared, applied = in_node(
        """
        globalThis.setTimeout = () => {};
        const present = { max_batch_size: 8, max_wait_ms: 5, target_latency_ms: null };
        const found = { settings: present, measured: { requests: 3 }, now: {}, tried: {}, seen: {}, window_s: 120 };
        let applied = null;
        globalThis.fetch = async (path, { body }) => {
          if (path.endsWith("/settings")) applied = JSON.parse(body);
          return { ok: true, json: async () => found };
        };
        const { WhatIf } = await import("./whatif.js");
        const whatIf = new WhatIf({ name: "m", kind: "item" });
        await whatIf.open();
        const { input } = whatIf.sliders.get("max_batch_size");
        input.value = 4;
        await whatIf.forecast();
        const apply = whatIf.result.children[1].firstChild;
        input.value = 0;
        input.oninput();
        const cleared = whatIf.result.children.length;
        await apply.onclick();
        console.log(JSON.stringify([cleared, applied]));
        """,
        tmp_path,
    )
    assert cleared == 0, "what nobody simulated can't be applied"
    assert applied == {"max_batch_size": 16}


TABLES = """
const { Tables } = await import("./tables.js");
const tables = new Tables();
const about = { model: "m", endpoint: "/v1/x", state: "in_progress", tenant: null };
const job = (id, completed) => ({ ...about, id, total: 10, completed, failed: 1 });
const tenant = (name, running) => ({ name, running, waiting: 0, ended: 3, tokens: 9, left: {} });
const update = (tenants, batches, more = {}) =>
  tables.update({ keys: true, tenants, batches, more, models: [], loadable: [], control: true });
const linesOf = (id) => nodes[id].firstChild.firstChild.children[2].children;
"""


def test_tables_stay_and_only_what_tells_something_else_is_made_anew(tmp_path: Path) -> None:
    """Text in another can't be selected, and it would not stay where it was scrolled to."""
    first, second, same = in_node(
        TABLES
        + """
        const parts = () => [nodes.tenants.firstChild, nodes.jobs.firstChild, ...linesOf("jobs"),
          linesOf("jobs")[0].children[0].children, linesOf("jobs")[0].children[4].children[0]];
        update([tenant("alice", 1)], [job("a", 1), job("b", 2)]);
        const before = parts();
        const first = [shown(nodes.tenants), shown(nodes.jobs)];
        update([tenant("alice", 1)], [job("a", 1), job("b", 2)]);
        const unchanged = parts();
        update([tenant("alice", 2)], [job("a", 5), job("b", 2)], { batches: 3 });
        const changed = parts();
        const second = [shown(nodes.tenants), shown(nodes.jobs)];
        const same = [unchanged, changed].map((now) => before.map((part, at) => part === now[at]));
        console.log(JSON.stringify([first, second, same]));
        """,
        tmp_path,
    )
    assert "alice|1|0|3|9|no limits" in first[0]
    assert "a|m|/v1/x|in_progress||2 of 10, 1 failed|" in first[1]
    assert "alice|2|0|3|9|no limits" in second[0]
    assert "a|m|/v1/x|in_progress||6 of 10, 1 failed|" in second[1]
    assert "; 3 more are not shown" in second[1]
    assert same == [[True] * 6, [True] * 5 + [False]], "of a job that got further, how far it is"


def test_models_that_are_not_shown_are_counted_loaded_or_not(tmp_path: Path) -> None:
    told = in_node(
        TABLES
        + """
        const told = [{}, { models: 2 }, { loadable: 3 }, { models: 2, loadable: 3 }].map((more) => {
          tables.update({ keys: false, tenants: [], batches: [], more, models: [], loadable: ["a"], control: false });
          return shown(nodes.models);
        });
        console.log(JSON.stringify(told));
        """,
        tmp_path,
    )
    found = [re.findall(r"(\d+) more are not shown", each) for each in told]
    assert found == [[], ["2"], ["3"], ["5"]]


def test_unloading_takes_two_clicks_that_are_no_double_click(tmp_path: Path) -> None:
    told, asked = in_node(
        """
        const timers = [];
        globalThis.setTimeout = (call) => timers.push(call);
        """
        + TABLES
        + """
        const asked = [];
        globalThis.fetch = async (path) => { asked.push(path); return { ok: true }; };
        const models = [{ name: "m", version: "1", task: "embed", state: "ready", failure: null }];
        tables.update({ keys: false, tenants: [], batches: [], more: {}, models, loadable: [], control: true });
        const unload = nodes.models.firstChild.firstChild.children[1].firstChild.children[4].firstChild.children[1];
        const told = [];
        const click = (detail) => {
          unload.onclick({ detail });
          told.push([unload.textContent, unload.attributes["aria-label"], asked.length]);
        };
        click(1);
        timers.shift()();
        click(1);
        click(2);
        click(1);
        console.log(JSON.stringify([told, asked]));
        """,
        tmp_path,
    )
    assert told == [["Really unload", "Really unload m", 0]] * 3 + [["Really unload", "Really unload m", 1]]
    assert asked == ["v2/repository/models/m/unload"]


def test_lines_come_and_go_with_what_they_are_of(tmp_path: Path) -> None:
    told = in_node(
        TABLES
        + """
        const told = [[job("a", 1)], [job("a", 1), job("b", 1)], [job("b", 1)], [], [job("c", 1)]].map((jobs) => {
          update([], jobs);
          return jobs.length ? linesOf("jobs").map((line) => shown(line.children[0])).join() : shown(nodes.jobs);
        });
        console.log(JSON.stringify([...told, shown(nodes.tenants)]));
        """,
        tmp_path,
    )
    assert told == ["a", "a,b", "b", "No batch is under way.", "c", "No key has been given out."]


def test_only_the_newest_version_of_a_model_has_sliders(tmp_path: Path) -> None:
    """The routes that they ask take no version, and speak of the newest."""
    hidden = in_node(
        """
        const { Panels } = await import("./panels.js");
        const look = { name: "m", version: "1", kind: "item", state: "ready", slots: 1, queue: [] };
        Object.assign(look, { running: 0, waiting: 0, written: null, busy: null, queue_time: null });
        const model = { look, bars: new Map(), past: [] };
        const feed = { message: { now: 1 }, models: new Map([["m 1", model]]) };
        const panels = new Panels(document.getElementById("panels"), feed, () => {}, () => {});
        const told = [true, false].map((newest) => {
          look.newest = newest;
          panels.update();
          return panels.panels.get("m 1").whatIf.node.hidden;
        });
        console.log(JSON.stringify(told));
        """,
        tmp_path,
    )
    assert hidden == [False, True]


def test_versions_of_a_model_are_told_apart(tmp_path: Path) -> None:
    one, both = in_node(
        """
        const { Panels } = await import("./panels.js");
        const modelOf = (name, version) => {
          const look = { name, version, kind: "item", state: "ready", slots: 1, queue: [], newest: true };
          Object.assign(look, { running: 0, waiting: 0, written: null, busy: null, queue_time: null });
          return { look, bars: new Map(), past: [] };
        };
        const models = new Map([["m 1", modelOf("m", "1")], ["other 1", modelOf("other", "1")]]);
        const feed = { message: { now: 1 }, models };
        const panels = new Panels(document.getElementById("panels"), feed, () => {}, () => {});
        const told = () => {
          panels.update();
          const { title, slots } = panels.panels.get("m 1");
          return [title.textContent, slots.canvas.attributes["aria-label"]];
        };
        const one = told();
        models.set("m 2", modelOf("m", "2"));
        console.log(JSON.stringify([one, told()]));
        """,
        tmp_path,
    )
    assert one[0] == "m"
    assert "instances of m over" in one[1]
    assert both[0] == "m, version 1"
    assert "instances of m, version 1 over" in both[1]
