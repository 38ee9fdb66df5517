"""Which strategy suits the traffic of a model that answers in one call, and why: in words, with the case's numbers."""

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE
from chairlift.plan.advice import ALONE, TrafficFacts, at_once, rounded, verdict, who_waits
from chairlift.plan.machine_profile import ItemProfile
from chairlift.plan.planner import ServingPlan, StrategyPlan

# The batch by which the gain is shown, and the gain below which a batch saves nothing.
_BATCH, _GAIN = 8, 1.1


def item_decision(plan: ServingPlan, facts: TrafficFacts, profile: ItemProfile) -> list[str]:
    """Return the questions that decide, each with its answer for this case, and what follows from them all."""
    # Whatever is no text has a size of 1, in a trace as for the server.
    size = facts.input_mean
    gain = _gain(profile, size)
    advised, rule = _advised(plan, facts, gain)
    seen = f"an answer takes {rounded(plan.alone.e2e)} s"
    return [
        _waiting(plan, facts, profile),
        _saving(profile, size, gain),
        # Who takes one item in a call has no next batch.
        *([_company(profile, facts, size)] if _shown_batch(profile) > 1 else []),
        rule,
        verdict(plan, advised, seen),
    ]


def _gain(profile: ItemProfile, size: float) -> float:
    """How many times as many items a second a batch computes as calls of one."""
    batch = _shown_batch(profile)
    return batch * (profile.call + profile.size * size) / ((profile.call + profile.size * size * batch) or 1.0)


def _shown_batch(profile: ItemProfile) -> int:
    """The batch by which the gain is shown: as large as the model takes."""
    return min(_BATCH, profile.max_batch_size or _BATCH)


def _waiting(plan: ServingPlan, facts: TrafficFacts, profile: ItemProfile) -> str:
    """Whether somebody waits for each answer, and what a full batch would make of that."""
    text = f"{who_waits(facts)}, of {rounded(facts.items)} items on average."
    full, dynamic = _of(plan, "static"), _of(plan, "dynamic")
    # A plan leaves out what is the model's own default.
    batch = int(full.settings.get("max_batch_size", profile.max_batch_size or DEFAULT_MAX_BATCH_SIZE))
    seconds = batch / (facts.rate * facts.items)
    text += f" A full batch of {batch} takes {rounded(seconds)} s to come together, so static is for work that is all"
    text += " there at once (chairlift run): then it answers"
    return f"{text} {rounded(full.capacity)} a second, and dynamic {rounded(dynamic.capacity)}."


def _saving(profile: ItemProfile, size: float, gain: float) -> str:
    """What items save by sharing a call."""
    batch = _shown_batch(profile)
    if batch == 1:
        cost = _ms(profile.call + profile.size * size)
        return f"Does a batch save anything? No: the model takes one item in a call, which costs {cost}."
    text = f"Does a batch save anything? A call costs {_ms(profile.call)} by itself and {_ms(profile.size * size)} for"
    return f"{text} each item: {batch} items in one call are {gain:.1f} times as fast as one by one."


def _company(profile: ItemProfile, facts: TrafficFacts, size: float) -> str:
    """Who comes while a call runs: they are the next batch, without a window."""
    seconds = profile.call + profile.size * size * facts.items
    meanwhile = facts.rate * facts.items * seconds
    text = f"Do several wait when an instance is free? A request's call takes {_ms(seconds)}, in which"
    text += f" {rounded(meanwhile)} more items come at this rate"
    if meanwhile < 1:
        return f"{text}: batches come together only where requests have several items, or within a window."
    return f"{text}: these are the next batch by themselves, and a window would only make them wait."


def _advised(plan: ServingPlan, facts: TrafficFacts, gain: float) -> tuple[set[str], str]:
    """The strategies that these answers speak for, and the rule that says so."""
    if gain < _GAIN:
        text = "So a batch saves next to nothing, and whoever is in it waits for all of it: calls of one item, none,"
        return {"none", "dynamic"}, f"{text} or small batches (dynamic)."
    if facts.items < ALONE and at_once(plan, facts) < ALONE:
        return {"none", "dynamic"}, "So there is hardly anything to batch: none or dynamic, as long as nobody waits."
    return {"dynamic"}, "So whoever waits when an instance is free should share a call: dynamic."


def _of(plan: ServingPlan, strategy: str) -> StrategyPlan:
    return next(each for each in plan.strategies if each.strategy == strategy)


def _ms(seconds: float) -> str:
    return f"{rounded(1000 * seconds)} ms"
