"""What the live page's code does by itself: the conversation, the connection to the server, tables and numbers."""

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
