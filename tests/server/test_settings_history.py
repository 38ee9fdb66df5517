"""Which settings a model had when."""

from math import inf

from chairlift.server.models.settings_history import _KEPT, SettingsHistory


def test_what_held_at_a_moment() -> None:
    history = SettingsHistory[str]()
    assert (history.last_change, history.at(-1e9, "a"), history.steady(0.0, 1e9)) == (-inf, "a", True)
    history.note("a", 10.0)
    history.note("b", 20.0)
    assert [history.at(moment, "c") for moment in (0.0, 9.9, 10.0, 19.9, 20.0, inf)] == ["a", "a", "b", "b", "c", "c"]
    assert history.last_change == 20.0
    assert history.steady(10.1, 19.9)
    assert not history.steady(9.0, 11.0)
    assert not history.steady(19.0, 21.0)


def test_of_what_is_forgotten_nothing_is_sure() -> None:
    history = SettingsHistory[int]()
    for change in range(_KEPT + 5):
        history.note(change, float(change))
    assert history.at(0.0, -1) == 5
    assert not history.steady(1.5, 1.6)
    assert history.steady(5.5, 5.6)
