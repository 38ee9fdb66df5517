# ruff: noqa: SIM905
"""Writes the demo model's training text: chats and paragraphs, made from the tables beside this file.

A question belongs to exactly one answer, so a trained model can be checked word for word. Phrasings marked held out are
never trained on; they tell how the model takes questions that are put a little differently.
"""

import functools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import demo_facts as facts
import demo_texts as texts
from demo_tools import CALCULATE, WEATHER, offered, parameters_of, repetition, turns

UNKNOWN = (
    "I am a small demo model, so I don't know that. Ask me about batching, inference serving, mountains, capitals, "
    "colours, days or small sums."
)
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "You are the Chairlift demo model.",
    "You are a helpful, honest and concise assistant.",
    "Answer the user's questions.",
    "You are an expert in inference serving.",
    "Be kind and clear.",
]


@dataclass
class Fact:
    """One answer and the ways to ask for it. `more` answers a following "Tell me more"."""

    kind: str
    asks: list[str]
    answer: str
    held_out: list[str] = field(default_factory=list)
    more: str = ""


def _up(text: str) -> str:
    return text[0].upper() + text[1:]


def _topic_facts() -> list[Fact]:
    forms = [
        "What is {}?",
        "Explain {}.",
        "What does {} mean?",
        "Can you explain {}?",
        "Tell me about {}.",
        "Define {}.",
    ]
    forms += [
        "How does {} work?",
        "What do you know about {}?",
        "Describe {}.",
        "Please explain {} to me.",
        "{}?",
        "{}",
    ]
    held = ["Could you tell me what {} is?", "I want to understand {}.", "Explain {} in simple words."]
    found = []
    for names, answer, more in texts.TOPICS:
        asks = [_up(form.format(name)) for name in names for form in forms]
        asks += [f"What are {name}?" for name in names if name.endswith("s")]
        found.append(Fact("topic", asks, answer, [form.format(names[0]) for form in held], more))
    return found


def _comparison_facts() -> list[Fact]:
    forms = ["What is the difference between {} and {}?", "Compare {} and {}.", "{} or {}?", "{} vs {}", "{} versus {}"]
    forms += ["How does {} differ from {}?", "What's the difference between {} and {}?"]
    held = ["Tell me the difference between {} and {}."]
    found = []
    for pair, answer in texts.DIFFERENCES:
        asks = [_up(form.format(*pair)) for form in forms]
        found.append(Fact("compare", asks, answer, [form.format(*pair) for form in held]))
    forms = [
        "Which batching strategy should I use for {}?",
        "How should I serve {}?",
        "What is the best strategy for {}?",
    ]
    forms += [
        "What strategy is right for {}?",
        "Which strategy suits {}?",
        "How do I batch {}?",
        "What batching should I use for {}?",
    ]
    for names, answer in texts.ADVICE:
        asks = [form.format(name) for name in names for form in forms]
        found.append(Fact("advice", asks, answer, [f"Which batching is right for {names[0]}?"]))
    return found


def _story_facts() -> list[Fact]:
    forms = ["Tell me a story {}", "Tell me a short story {}", "Write a story {}", "Write a short story {}"]
    forms += ["I want to hear a story {}", "Can you tell a story {}", "Do you know a story {}"]
    found = []
    for subjects, story in texts.STORIES:
        asks = [form.format(subject).strip() + mark for subject in subjects for form in forms for mark in (".", "")]
        found.append(Fact("story", asks, story, [f"Please tell me a little story {subjects[0]}".strip() + "."]))
    return found


def _capital_facts() -> list[Fact]:
    found = []
    for country, city in facts.CAPITALS.items():
        names = [country, *facts.COUNTRY_ALIASES.get(country, [])]
        forms = ["What is the capital of {}?", "What's the capital of {}?", "Which city is the capital of {}?"]
        forms += ["Name the capital of {}.", "Capital of {}?", "Tell me the capital of {}.", "What is {}'s capital?"]
        asks = [form.format(name) for name in names for form in forms]
        held = [f"Do you know the capital of {country}?"]
        dot = "" if city.endswith(".") else "."
        found.append(Fact("capital", asks, f"The capital of {country} is {city}{dot}", held))
        asks = [f"{city} is the capital of which country?", f"Which country has {city} as its capital?"]
        found.append(Fact("country", asks, f"{city} is the capital of {country}."))
    return found


def _calendar_facts() -> list[Fact]:
    found = [Fact("calendar", list(asks), answer) for asks, answer in facts.CALENDAR]
    for kind, names in (("day", facts.DAYS), ("month", facts.MONTHS)):
        for index, name in enumerate(names):
            after, before = names[(index + 1) % len(names)], names[index - 1]
            forms = ["What {} comes after {}?", "Which {} comes after {}?", "Which {} follows {}?"]
            asks = [form.format(kind, name) for form in forms] + [f"What comes after {name}?"]
            asks += [f"What {kind} is it after {name}?", f"Name the {kind} after {name}."]
            found.append(Fact("calendar", asks, f"{after} comes after {name}.", [f"Which {kind} is after {name}?"]))
            asks = [
                f"What {kind} comes before {name}?",
                f"Which {kind} comes before {name}?",
                f"What comes before {name}?",
            ]
            found.append(Fact("calendar", asks, f"{before} comes before {name}.", [f"Which {kind} is before {name}?"]))
    for name, days in zip(facts.MONTHS, facts.MONTH_DAYS, strict=True):
        asks = [
            f"How many days does {name} have?",
            f"How many days are in {name}?",
            f"How many days are there in {name}?",
        ]
        leap = ", and 29 in a leap year" if days == 28 else ""
        found.append(Fact("calendar", asks, f"{name} has {days} days{leap}."))
    return found


def _word_facts() -> list[Fact]:
    found = []
    for first, second in facts.OPPOSITES:
        for word, other in ((first, second), (second, first)):
            forms = ["What is the opposite of {}?", "What's the opposite of {}?", "Opposite of {}?"]
            forms += ["Tell me the opposite of {}.", "Which word is the opposite of {}?"]
            asks = [form.format(word) for form in forms]
            held = [f"Name the opposite of {word}."]
            found.append(Fact("opposite", asks, f"The opposite of {word} is {other}.", held))
    for thing, answer in facts.COLOURS:
        forms = ["What colour is {}?", "What color is {}?", "Which colour is {}?", "What is the colour of {}?"]
        found.append(Fact("colour", [f.format(thing) for f in forms], answer, [f"Tell me the colour of {thing}."]))
    for one, two, mix in facts.MIXES:
        for a, b in ((one, two), (two, one)):
            asks = [f"What do you get when you mix {a} and {b}?", f"What colour do {a} and {b} make?"]
            asks += [f"What is {a} and {b} mixed?", f"Mix {a} and {b}."]
            found.append(Fact("colour", asks, f"When you mix {a} and {b}, you get {mix}."))
    return found


def _number_facts() -> list[Fact]:
    found = []

    def add(sign: str, word: str, a: int, b: int, result: int) -> None:
        asks = [f"What is {a} {sign} {b}?", f"{a} {sign} {b}", f"How much is {a} {sign} {b}?", f"{a} {sign} {b} ="]
        asks += [f"What is {a} {word} {b}?", f"Calculate {a} {sign} {b}.", f"{a}{sign}{b}", f"What's {a} {sign} {b}?"]
        found.append(Fact("sum", asks, f"{a} {sign} {b} = {result}.", [f"Can you compute {a} {sign} {b}?"]))

    for a in range(13):
        for b in range(13):
            add("+", "plus", a, b, a + b)
            if b <= a:
                add("-", "minus", a, b, a - b)
    for a in range(1, 11):
        for b in range(1, 11):
            add("*", "times", a, b, a * b)
    for n in [*range(2, 13), 15, 20]:
        row = ", ".join(map(str, range(1, n + 1)))
        asks = [f"Count to {n}.", f"Count from 1 to {n}.", f"Can you count to {n}?", f"Please count to {n}."]
        found.append(Fact("count", asks, f"{row}."))
    for n in range(21):
        asks = [f"What number comes after {n}?", f"Which number comes after {n}?", f"What comes after {n}?"]
        found.append(Fact("count", asks, f"{n + 1} comes after {n}."))
    return found


def all_facts() -> list[Fact]:
    """Everything that the model shall know word for word."""
    found = [Fact("fixed", list(asks), answer) for asks, answer in facts.FIXED]
    found += _topic_facts() + _comparison_facts() + _story_facts()
    found += _capital_facts() + _calendar_facts() + _word_facts() + _number_facts()
    owner: dict[str, str] = {}
    for fact in found:
        for ask in fact.asks:
            if owner.setdefault(ask, fact.answer) != fact.answer:
                raise ValueError(f"two answers for {ask!r}")
    return found


_NOUNS = (
    "bread cheese guitar football bicycle planet ocean rocket garden poem novel painting battery camera window "
    "telephone medicine volcano dinosaur whale tiger engine bridge island castle doctor lawyer teacher singer actor "
    "film movie song recipe soup cake coffee tea sugar salt iron copper diamond electron atom molecule cell gene "
    "virus galaxy comet law tax election president king queen war treaty stock market bank loan contract visa "
    "passport airport train ship keyboard printer database compiler browser password website email phone robot drone "
    "satellite"
).split()
_UNKNOWN_FORMS = (
    "Who won the world cup in {year}?|What is the population of {name}?|Who is {Name}?|Who was {Name} {Name2}?|"
    "What is the weather in {Name}?|What is the weather like today?|What time is it?|What day is it today?|"
    "How do I cook {noun}?|How do I make {noun}?|Write a poem about a {noun}.|Write a python function for a {noun}.|"
    "What is the price of a {noun}?|How much does a {noun} cost?|What is the capital of {Name}?|Where is {Name}?|"
    "What is a {noun}?|Explain {name}.|What is {name}?|Tell me about {Name}.|What is the history of the {noun}?|"
    "Who invented the {noun}?|When was the {noun} invented?|Translate {noun} into French.|"
    "How do you say {noun} in German?|What is the best {noun}?|What happened in {year}?|Who was born in {year}?|"
    "How old is {Name}?|How far is {Name}?|What is {big} + {big2}?|What is {big} * {big2}?|{big} - {big2}|"
    "What is the square root of {big}?|Solve x + {big} = {big2}.|Summarize the book {Name}.|Recommend a {noun}.|"
    "Can you recommend a good {noun}?|Why is the {noun} so expensive?|What is the opposite of {name}?|"
    "What colour is {name}?|How does a {noun} work?|Should I buy a {noun}?|{name}|{name} {name2}|"
    "Write an essay about {noun} and {noun2}.|What is the difference between a {noun} and a {noun2}?|"
    "Compare {Name} and {Name2}.|Where can I find a {noun}?|Is a {noun} dangerous?|Why do people like {noun}?|"
    "Which {noun} is the best?|How many people live in {Name}?|What language do they speak in {Name}?|"
    "Do you like {noun}?|Fix this code: {name} = {big}|What is the speed of a {noun}?|Describe a {noun}.|"
    "Give me a recipe for {noun}.|Who wrote {Name}?|Who directed {Name}?|What does {name} mean?|Define {name}.|"
    "Define {noun}.|Play a song.|Book a flight to {Name}.|Send an email to {Name}.|Open the {noun}.|"
    "Turn on the {noun}.|What is in the news?"
).split("|")


_WEATHER_FORMS = [form for form in _UNKNOWN_FORMS if "weather" in form]
_SUM_FORMS = ["What is {big} + {big2}?", "What is {big} * {big2}?", "{big} - {big2}"]


def unknown_question(rng: random.Random, tools: Collection[str] = ()) -> str:
    """A question that the model can't answer, with these tools or without: everyday subjects, made-up names, large
    numbers."""
    name = functools.partial(facts.made_up_name, rng)
    answered = [*(_WEATHER_FORMS if WEATHER in tools else []), *(_SUM_FORMS if CALCULATE in tools else [])]
    forms = [form for form in _UNKNOWN_FORMS if form not in answered]
    words = {"name": name(), "name2": name(), "Name": _up(name()), "Name2": _up(name())}
    numbers = {"year": rng.randint(1500, 2030), "big": rng.randint(40, 9999), "big2": rng.randint(40, 9999)}
    return rng.choice(forms).format(noun=rng.choice(_NOUNS), noun2=rng.choice(_NOUNS), **words, **numbers)


_MORE = ["Tell me more.", "Tell me more", "Can you tell me more?", "More, please.", "Go on.", "And what else?"]
# How often each kind is drawn; a kind's share is spread over its facts.
_WEIGHTS = {
    "fixed": 8, "topic": 24, "compare": 6, "advice": 4, "story": 5, "capital": 9, "country": 5, "calendar": 8,
    "opposite": 7, "colour": 4, "sum": 42, "count": 9, "unknown": 12,
}  # fmt: skip


# The share of each kind of document, for a model that knows nothing yet and has to learn to copy, and for one that was
# trained on those and goes on, with more of what it was weakest at.
FROM_NOTHING = {"paragraph": 0.03, "repetitions": 0.15, "sums": 0.0, "chat with tools": 0.16, "chat": 0.66}
GOING_ON = {"paragraph": 0.03, "repetitions": 0.07, "sums": 0.12, "chat with tools": 0.33, "chat": 0.45}
# The share of questions that take a tool, in chats that have one which the model can call.
_TAKES_TOOL = 0.6


@dataclass
class Chat:
    """Messages, and the tools that may be called in them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


class Corpus:
    """An endless, seeded stream of training documents: chats, and plain paragraphs as strings."""

    def __init__(self, seed: int, shares: dict[str, float]) -> None:
        self._rng = random.Random(seed)
        self._shares = shares
        self._by_kind: dict[str, list[Fact]] = {}
        for fact in all_facts():
            self._by_kind.setdefault(fact.kind, []).append(fact)
        # Drawn without replacement, so that no fact is left out for long.
        self._bags: dict[str, list[Fact]] = {}

    def document(self) -> Chat | str:
        """The next document."""
        [kind] = self._rng.choices(list(self._shares), list(self._shares.values()))
        makers: dict[str, Callable[[], Chat | str]] = {
            "paragraph": self._paragraph,
            "repetitions": self._repetitions,
            "sums": self._sums,
            "chat with tools": self._chat_with_tools,
            "chat": self._chat,
        }
        return makers[kind]()

    def _repetitions(self) -> Chat:
        return Chat([said for _ in range(self._rng.randint(1, 3)) for said in repetition(self._rng).messages()])

    def _sums(self) -> Chat:
        return Chat([said for _ in range(self._rng.choice([1, 1, 2, 4, 8])) for said in self._turn(["sum"])])

    def _paragraph(self) -> str:
        choices = [answer for _, answer, _ in texts.TOPICS] + [story for _, story in texts.STORIES] * 2
        return self._rng.choice(choices + texts.PARAGRAPHS * 6)

    def _chat(self) -> Chat:
        messages = self._system()
        for _ in range(self._rng.choice([1, 1, 1, 1, 2, 2, 3, 4])):
            messages += self._turn(list(_WEIGHTS))
        return Chat(messages)

    def _chat_with_tools(self) -> Chat:
        tools = offered(self._rng)
        have = parameters_of(tools)
        useful = WEATHER in have or CALCULATE in have
        kinds = [kind for kind in _WEIGHTS if kind != "sum" or CALCULATE not in have]
        messages = self._system()
        for _ in range(self._rng.choice([1, 1, 1, 2, 2, 3])):
            if useful and self._rng.random() < _TAKES_TOOL:
                for turn in turns(self._rng, tools):
                    messages += turn.messages()
            else:
                messages += self._turn(kinds, have)
        return Chat(messages, tools)

    def _system(self) -> list[dict[str, Any]]:
        if self._rng.random() < 0.25:
            return [{"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)}]
        return []

    def _turn(self, kinds: list[str], tools: Collection[str] = ()) -> list[dict[str, Any]]:
        """A question that takes no tool, and the answer, at times with more of it."""
        rng = self._rng
        kind = rng.choices(kinds, [_WEIGHTS[each] for each in kinds])[0]
        if kind == "unknown":
            return _said(unknown_question(rng, tools), UNKNOWN)
        fact = self._draw(kind)
        messages = _said(self._vary(rng.choice(fact.asks)), fact.answer)
        if fact.more and rng.random() < 0.4:
            messages += _said(rng.choice(_MORE), fact.more)
        return messages

    def _draw(self, kind: str) -> Fact:
        if not self._bags.get(kind):
            self._bags[kind] = self._by_kind[kind].copy()
            self._rng.shuffle(self._bags[kind])
        return self._bags[kind].pop()

    def _vary(self, ask: str) -> str:
        """People are careless: lower case, no full stop, a greeting or a please."""
        draw = self._rng.random()
        if draw < 0.60:
            return ask
        if draw < 0.70:
            return ask.lower()
        if draw < 0.78:
            return ask.rstrip("?.! ") or ask
        if draw < 0.84:
            return ask.lower().rstrip("?.! ") or ask
        if draw < 0.88:
            return self._rng.choice(["Please, ", "Hi, ", "Hello! ", "Hey, ", "Quick question: ", "Ok, "]) + ask
        if draw < 0.94 and ask.endswith("?"):
            start = self._rng.choice(["Can you tell me: ", "Do you know: ", "I have a question. ", "So, ", "Tell me, "])
            return start + ask[0].lower() + ask[1:]
        return ask + self._rng.choice(["", " ", " Please.", " Thanks!", "\n", "!"])


def _said(ask: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
