"""The dashboard and the alerts in deploy/: whatever they ask Prometheus for, a real server tells it."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.server import status
from chairlift.server.oip import http_routes as oip
from chairlift.server.routes import ENDPOINTS

if TYPE_CHECKING:
    from support.serve_process import Server

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES, DASHBOARD = DEPLOY / "prometheus-rules.yml", DEPLOY / "grafana-dashboard.json"
_SELECTOR = re.compile(r"\b(chairlift_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring) \(([^)]*)\)")
_LEGEND = re.compile(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}")
# What Prometheus adds to what it scrapes.
_SCRAPED = {"job", "instance"}
_FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile", "by", "and", "on", "le"}

Exposed = dict[str, dict[str, set[str]]]


IMAGE = DEPLOY.parent / "Dockerfile"


@cache
def rules() -> list[Any]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    made: list[Any] = group["rules"]
    return made


@cache
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def panels() -> Iterator[Any]:
    return (panel for panel in dashboard()["panels"] if panel["type"] != "row")


def queries() -> list[tuple[str, str]]:
    """Every expression, and the text that names labels of what it gives."""
    found = [(rule["expr"], " ".join(rule["annotations"].values())) for rule in rules()]
    return found + [(query["expr"], query["legendFormat"]) for panel in panels() for query in panel["targets"]]


def exposed(server: "Server") -> Exposed:
    """The samples of a server: name, labels, and the values that each of them has."""
    assert server.http.get("/v1/models").status_code == 200, "so that an answer has been counted"
    found: Exposed = {"up": {}}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def problems(expression: str, told: str, there: Exposed) -> list[str]:
    """What an expression asks for and a server does not have."""
    wrong, labels = [], set(_SCRAPED)
    for name, matchers in _SELECTOR.findall(expression):
        if name not in there:
            wrong.append(f"no metric {name}")
            continue
        known = there[name]
        labels |= known.keys()
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in known.keys() | _SCRAPED:
                wrong.append(f"{name} has no label {label}")
            elif operator in ("=", "!=") and label in known and value not in known[label]:
                wrong.append(f"{name} is never {label}={value}")
    grouped = {label.strip() for group in _GROUPED.findall(expression) for label in group.split(",")}
    wrong += [f"nothing has the label {label}" for label in sorted(grouped - labels)]
    named = set(_LEGEND.findall(told))
    left = grouped if "sum by" in expression else labels
    return wrong + [f"the answer has no label {label}" for label in sorted(named - left)]


def test_what_they_ask_for_is_exposed_with_the_labels_that_they_use(models_server: "Server") -> None:
    there = exposed(models_server)
    found = {expression: wrong for expression, told in queries() if (wrong := problems(expression, told, there))}
    assert not found


def test_what_would_be_found() -> None:
    there: Exposed = {"chairlift_a_total": {"model": {"m"}, "reason": {"stop"}}, "up": {}}
    assert problems('sum by (model) (rate(chairlift_a_total{reason="stop"}[5m])) > 1', "{{model}}", there) == []
    assert problems('up{job="x"} == 0', "{{ $labels.instance }}", there) == []
    assert problems("rate(chairlift_b_total[5m])", "", there) == ["no metric chairlift_b_total"]
    assert problems('chairlift_a_total{code="5"}', "", there) == ["chairlift_a_total has no label code"]
    assert problems('chairlift_a_total{reason="oops"}', "", there) == ["chairlift_a_total is never reason=oops"]
    assert problems("sum by (code) (chairlift_a_total)", "", there) == ["nothing has the label code"]
    assert problems("sum by (model) (chairlift_a_total)", "{{reason}}", there) == ["the answer has no label reason"]


def test_the_expressions_are_balanced_and_use_what_promql_has() -> None:
    for expression, _ in queries():
        bare = re.sub(r'"[^"]*"', "", expression)
        for opening, closing in ("()", "[]", "{}"):
            assert bare.count(opening) == bare.count(closing), expression
        called = set(re.findall(r"\b([a-z_]+) ?\(", bare))
        assert called <= _FUNCTIONS, expression


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+[sm]", rule.get("for", "0s"))


def test_what_probes_are_told_is_no_failure() -> None:
    """They are told 503 for as long as a model loads."""
    (expression,) = (rule["expr"] for rule in rules() if rule["alert"] == "ChairliftAnswersFail")
    first, second = re.findall(r'route!~"([^"]*)"', expression)
    assert first == second
    probes = (status.root, status.ready, status.live, oip.live_route, oip.ready_route, oip.model_ready_route)
    left_out = {row.path for row in ENDPOINTS if re.fullmatch(first, row.path)}
    assert left_out == {row.path for row in ENDPOINTS if row.handler in probes}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_prometheus_takes_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_dashboard_has_what_grafana_needs() -> None:
    made = dashboard()
    assert (made["uid"], made["title"]) == ("chairlift", "Chairlift")
    assert made["schemaVersion"] >= 36
    variables = {each["name"]: each for each in made["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["model"]["query"]["query"] == "label_values(chairlift_ready, model)"
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    covered: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & covered, f"{panel['title']} lies on another"
        covered |= cells
    for panel in panels():
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [query["refId"] for query in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        for query in panel["targets"]:
            assert query["datasource"]["uid"] == "${datasource}", "whoever imports it chooses"
            assert query["legendFormat"]


def test_the_guide_names_both_files() -> None:
    text = (DEPLOY.parent / "docs/guides/monitoring.md").read_text()
    assert DASHBOARD.name in text
    assert RULES.name in text
    assert [rule["alert"] for rule in rules() if f"`{rule['alert']}`" not in text] == []


def test_process_1_of_the_image_is_an_init() -> None:
    """Of what a worker leaves behind nobody else would take the exit status, so that it would be there for ever."""
    last = IMAGE.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^RUN apt-get update && apt-get install .* tini ", last, re.MULTILINE)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)
    assert json.loads(entry) == ["tini", "--", "chairlift"]
