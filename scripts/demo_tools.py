# ruff: noqa: SIM905
"""What the demo model learns of tools: two that it can call, when to call them, and what to say of their results."""

import operator
import random
from dataclasses import dataclass, field
from typing import Any

import demo_facts as facts

WEATHER, CALCULATE = "get_weather", "calculate"


def tool(name: str, *parameters: str) -> dict[str, Any]:
    """A tool as requests declare it, with parameters that are texts."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


# The template shows no more of them than these names.
TOOLS = [tool(WEATHER, "city", "unit"), tool(CALCULATE, "expression")]
_PLAINER = [tool(WEATHER, "city"), tool(WEATHER, "city", "unit"), tool(CALCULATE, "expression")]
# Tools that other people have. The model leaves them alone.
_OTHERS = [
    tool("get_time", "timezone"), tool("search", "query"), tool("send_email", "to", "subject", "body"),
    tool("translate", "text", "language"), tool("get_stock_price", "symbol"), tool("play_music", "song", "artist"),
    tool("book_flight", "origin", "destination", "date"), tool("read_file", "path"), tool("set_alarm", "time"),
    tool("lookup", "key"), tool("create_event", "title", "start", "end"), tool("get_news", "topic"),
]  # fmt: skip
_MORE_CITIES = (
    "New York|Los Angeles|San Francisco|Chicago|Boston|Seattle|Toronto|Vancouver|Montreal|Sydney|Melbourne|Munich|"
    "Hamburg|Cologne|Zurich|Geneva|Basel|Salzburg|Innsbruck|Barcelona|Seville|Milan|Venice|Florence|Naples|Lyon|Nice|"
    "Marseille|Chamonix|Grenoble|Porto|Antwerp|Rotterdam|Edinburgh|Manchester|Liverpool|Oxford|Krakow|Mumbai|Shanghai|"
    "Osaka|Kyoto|Istanbul|Dubai|Cape Town|Rio de Janeiro|Sao Paulo|Denver|Miami|Zermatt"
).split("|")
CITIES = sorted(set(facts.CAPITALS.values()) | set(_MORE_CITIES))
_WEATHER_FORMS = (
    "What is the weather in {}?|What's the weather in {}?|What is the weather like in {}?|How is the weather in {}?|"
    "What is the weather in {} today?|What's the weather like in {} today?|How is the weather in {} now?|"
    "Weather in {}|Weather in {}?|What is the temperature in {}?|How warm is it in {}?|How cold is it in {}?|"
    "Is it raining in {}?|Is it sunny in {}?|Is it snowing in {}?|Tell me the weather in {}.|Check the weather in {}.|"
    "Get the weather in {}.|Can you check the weather in {}?|Do I need an umbrella in {}?|How hot is it in {}?|"
    "I am going to {}. What is the weather there?|Look up the weather in {}.|Could you check the weather in {}?|"
    "Please tell me the weather in {}.|Tell me how cold it is in {}.|The weather in {}, please.|{} forecast|"
    "{} temperature?|I want to know how windy it is in {}."
).split("|")
_UNIT_FORMS = (
    "What is the weather in {} in {unit}?|What is the temperature in {} in {unit}?|Weather in {} in {unit}|"
    "How warm is it in {} in {unit}?|Tell me the weather in {} in {unit}.|What's the weather in {}, in {unit}?|"
    "Check the weather in {} in {unit}.|What is the temperature in {} in degrees {unit}?"
).split("|")
_WEATHER_HELD_OUT = ["Could you look up the weather in {}?", "Please tell me how warm it is in {}.", "{} weather?"]
_TWO_CITIES = (
    "What is the weather in {} and {}?|What is the weather in {} and in {}?|Weather in {} and {}|"
    "How is the weather in {} and in {}?|Compare the weather in {} and {}.|Is it warmer in {} or in {}?|"
    "Tell me the weather in {} and {}."
).split("|")
_NO_CITY = [
    "What is the weather?", "What is the weather like?", "What is the weather like today?", "How is the weather?",
    "Is it raining?", "How warm is it?", "What's the weather today?",
]  # fmt: skip
_WHICH_CITY = "Which city do you mean?"
_SUM_FORMS = (
    "What is {}?|{}|How much is {}?|{} =|Calculate {}.|What's {}?|Compute {}.|Calculate {}|Please calculate {}.|"
    "Can you calculate {}?|What is the result of {}?|Work out {}.|Give me the result of {}.|Tell me what {} is.|"
    "I want to know what {} is.|Calculate: {}|Could you work out {}?|Use calculate for {}."
).split("|")
_SUM_HELD_OUT = ["Can you compute {}?", "Use the calculator: {}", "I need the result of {}."]
_BOTH_FORMS = (
    "What is the weather in {}, and what is {}?|What is the weather in {} and what is {}?|"
    "Tell me the weather in {} and calculate {}."
).split("|")
_SKIES = "sunny cloudy rainy snowy windy foggy stormy clear".split()
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_FAILURES = ["no such city", "timeout", "not found", "service unavailable", "division by zero", "try again later"]
_FAILED = "The tool failed, so I don't know."


_REPEAT_FORMS = (
    "Repeat this: {}|Say this again: {}|Copy this: {}|Echo: {}|Write this once more: {}|Please repeat: {}".split("|")
)


@dataclass
class Turn:
    """A question, the calls that it takes, what they give, and what the model says of that: at once if it calls
    nothing."""

    ask: str
    answer: str
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """The turn as the template takes it."""
        said = [{"role": "user", "content": self.ask}]
        if self.calls:
            said.append(calling(self.calls))
            said += [{"role": "tool", "content": result} for result in self.results]
        return [*said, {"role": "assistant", "content": self.answer}]


def calling(calls: list[tuple[str, dict[str, str]]]) -> dict[str, Any]:
    """An assistant's message that calls tools."""
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def offered(rng: random.Random) -> list[dict[str, Any]]:
    """The tools of a chat: mostly the two, in any order, at times one of them, at times among others."""
    draw = rng.random()
    found = list(TOOLS)
    if draw > 0.5:
        found = [rng.choice(_PLAINER)] if draw < 0.8 else [] if draw < 0.87 else list(TOOLS)
        found += rng.sample(_OTHERS, rng.randint(0 if found else 1, 3))
    if rng.random() < 0.4:
        rng.shuffle(found)
    return found


def repetition(rng: random.Random) -> Turn:
    """Names and numbers to be said again. They teach the model to copy, which every call and every result asks of it,
    far sooner than calls alone, of which only a few tokens are copied."""
    words = [rng.choice([_city, _some_digits, facts.made_up_name])(rng) for _ in range(rng.randint(2, 14))]
    text = rng.choice([" ", " ", ", ", " + ", "\n"]).join(words)
    return Turn(rng.choice(_REPEAT_FORMS).format(text), text)


def _some_digits(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=rng.randint(1, 6)))


def parameters_of(tools: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The parameters of each tool, by its name."""
    return {each["function"]["name"]: list(each["function"]["parameters"]["properties"]) for each in tools}


def turns(rng: random.Random, tools: list[dict[str, Any]], held_out: bool = False) -> list[Turn]:
    """One question that these tools answer, at times with another that follows from it. There must be one of the two
    tools."""
    have = parameters_of(tools)
    both = WEATHER in have and CALCULATE in have
    draw = rng.random()
    if both and draw < 0.06 and not held_out:
        return [_both(rng)]
    if WEATHER not in have or (CALCULATE in have and draw < 0.5):
        return [_sum(rng, held_out)]
    if draw > 0.97 and not held_out:
        return [Turn(rng.choice(_NO_CITY), _WHICH_CITY)]
    if draw > 0.86 and not held_out:
        return [_two_cities(rng)]
    first = _weather(rng, "unit" in have[WEATHER], held_out)
    if held_out or rng.random() > 0.15:
        return [first]
    city = _city(rng)
    report, said = _report(rng, city, "")
    follow_up = rng.choice(["And in {}?", "And {}?", "What about {}?", "How about {}?"]).format(city)
    return [first, Turn(follow_up, said, [(WEATHER, {"city": city})], [report])]


def _city(rng: random.Random) -> str:
    """Sometimes one that is none, so that names are copied and not guessed."""
    if rng.random() < 0.75:
        return rng.choice(CITIES)
    return " ".join(facts.made_up_name(rng).capitalize() for _ in range(1 if rng.random() < 0.8 else 2))


def _weather(rng: random.Random, with_unit: bool, held_out: bool) -> Turn:
    city, unit = _city(rng), ""
    if with_unit and not held_out and rng.random() < 0.3:
        unit = rng.choice(["celsius", "fahrenheit"])
        ask = rng.choice(_UNIT_FORMS).format(city, unit=unit.capitalize() if rng.random() < 0.7 else unit)
    else:
        ask = rng.choice(_WEATHER_HELD_OUT if held_out else _WEATHER_FORMS).format(city)
    if city in CITIES and not held_out:
        ask = _careless(rng, ask)
    report, said = _report(rng, city, unit)
    return Turn(ask, said, [(WEATHER, {"city": city} | ({"unit": unit} if unit else {}))], [report])


def _careless(rng: random.Random, ask: str) -> str:
    draw = rng.random()
    if draw < 0.75:
        return ask
    if draw < 0.87:
        return ask.lower()
    return ask.rstrip("?.!") if draw < 0.94 else ask.lower().rstrip("?.!")


def _report(rng: random.Random, city: str, unit: str) -> tuple[str, str]:
    """What the weather's tool gives, in one of the ways that people's tools have, and what the model makes of it."""
    if rng.random() < 0.04:
        return _failure(rng), _FAILED
    sky = rng.choice(_SKIES)
    degrees = rng.randint(5, 104) if unit == "fahrenheit" else rng.randint(-15, 40)
    shown = unit or "celsius"
    report = rng.choice(
        [
            f'{{"temperature": {degrees}, "unit": "{shown}", "condition": "{sky}"}}',
            f'{{"temperature": {degrees}, "condition": "{sky}"}}',
            f'{{"city": "{city}", "temperature": {degrees}, "unit": "{shown}", "condition": "{sky}"}}',
            f'{{"condition": "{sky}", "temperature": {degrees}}}',
            f'{{"temp": {degrees}, "sky": "{sky}"}}',
            f"{sky}, {degrees} degrees",
            f"{degrees} degrees and {sky}",
            f"{sky}, {degrees} °{shown[0].upper()}",
        ]
    )
    named = f" {unit.capitalize()}" if unit else ""
    return report, f"In {city} it is {sky}, and the temperature is {degrees} degrees{named}."


def _failure(rng: random.Random) -> str:
    problem = rng.choice(_FAILURES)
    return rng.choice([f'{{"error": "{problem}"}}', f"Error: {problem}", f"error: {problem}"])


def _number(rng: random.Random) -> int:
    return rng.randint(*rng.choice([(0, 12), (2, 99), (2, 99), (100, 999), (1000, 99999)]))


def _expression(rng: random.Random) -> tuple[str, str]:
    """A sum as the tool takes it, and its result."""
    a, b, c = _number(rng), _number(rng), rng.randint(2, 99)
    one, other = rng.choice("++--***/"), rng.choice("+-")
    if one == "/":
        b = max(b, 1)
    text, result = f"{a} {one} {b}", _OPERATIONS[one](a, b)
    draw = rng.random()
    if draw > 0.93:
        text, result = f"({a} + {b}) * {c}", (a + b) * c
    elif draw > 0.8:
        text, result = f"{text} {other} {c}", _OPERATIONS[other](result, c)
    return text, str(int(result) if result == int(result) else round(result, 2))


def _sum(rng: random.Random, held_out: bool) -> Turn:
    expression, result = _expression(rng)
    form = rng.choice(_SUM_HELD_OUT if held_out else _SUM_FORMS)
    ask = form.format(_as_people_write(rng, expression))
    if not held_out:
        ask = _careless(rng, ask)
    return Turn(ask, *_worked_out(rng, expression, result))


def _as_people_write(rng: random.Random, expression: str) -> str:
    draw = rng.random()
    if draw < 0.7:
        return expression
    if draw < 0.8:
        return expression.replace(" ", "")
    return " ".join(_WORDS.get(part, part) for part in expression.split(" "))


def _worked_out(
    rng: random.Random, expression: str, result: str
) -> tuple[str, list[tuple[str, dict[str, str]]], list[str]]:
    calls = [(CALCULATE, {"expression": expression})]
    if rng.random() < 0.04:
        return _FAILED, calls, [_failure(rng)]
    given = rng.choice(
        [result, result, f'{{"result": {result}}}', f'{{"value": {result}}}', f"{expression} = {result}"]
    )
    return f"{expression} = {result}.", calls, [given]


def _two_cities(rng: random.Random) -> Turn:
    one, two = _city(rng), _city(rng)
    (report, said), (other, more) = _report(rng, one, ""), _report(rng, two, "")
    calls = [(WEATHER, {"city": city}) for city in (one, two)]
    answer = _FAILED if _FAILED in (said, more) else f"{said} {more}"
    return Turn(rng.choice(_TWO_CITIES).format(one, two), answer, calls, [report, other])


def _both(rng: random.Random) -> Turn:
    city, (expression, result) = _city(rng), _expression(rng)
    report, said = _report(rng, city, "")
    ask = rng.choice(_BOTH_FORMS).format(city, expression)
    more, calls, given = _worked_out(rng, expression, result)
    answer = _FAILED if _FAILED in (said, more) else f"{said} {more}"
    return Turn(ask, answer, [(WEATHER, {"city": city}), *calls], [report, *given])
