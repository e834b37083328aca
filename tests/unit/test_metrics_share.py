"""The scrape configuration and the dashboard: each can be loaded and asks for what there is."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import layout, service, settings
from dsv4 import engine_metrics, watchdog

DASHBOARD = layout.FILES / str(layout.DASHBOARD).lstrip("/")
RECORDED = Path(__file__).with_name("vllm_0_30_0_metrics.txt")
PARTS = {"histogram": ("_bucket", "_sum", "_count")}
WORDS = {"by", "without", "on", "ignoring", "offset", "bool", "and", "or", "unless"}


def vllm_names() -> set[str]:
    """Return the names that vLLM 0.30.0 gives, as a query asks for them."""
    rows = (line.split() for line in RECORDED.read_text().splitlines() if line[0] != "#")
    return {f"{name}{part}" for kind, name in rows for part in PARTS.get(kind, ("",))}


def our_names() -> set[str]:
    """Return the names that the watchdog writes, from its own table."""
    return {f"dsv4_{name}" for name in watchdog.METRICS}


def metrics_in(query: str) -> set[str]:
    """Return the metrics that a query in Prometheus's language asks for."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", query)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    found = re.finditer(r"[A-Za-z_:][A-Za-z0-9_:]*(?!\w)(?P<call>\s*\()?", bare)
    return {it[0] for it in found if not it["call"] and it[0] not in WORDS}


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    """The dashboard, as Grafana reads it."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that show something."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def queries(board: dict[str, Any]) -> list[str]:
    """Return every query there is, those of the variables included."""
    found = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    return found + [
        variable["query"]["query"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ('dsv4_engine_phase{phase="ready"} == 1', {"dsv4_engine_phase"}),
        ("time() - dsv4_x{}", {"dsv4_x"}),
        ('sum by (le) (rate(vllm:a_bucket{m=~"$m"}[$__rate_interval]))', {"vllm:a_bucket"}),
        ("rate(vllm:a_total[5m]) / rate(vllm:b_total[5m])", {"vllm:a_total", "vllm:b_total"}),
        ("histogram_quantile(0.95, sum by (le) (rate(x_bucket{}[1m])))", {"x_bucket"}),
    ],
)
def test_names_are_found_in_a_query(query: str, names: set[str]) -> None:
    """Functions, labels, ranges and grouping are none."""
    assert metrics_in(query) == names


def test_every_query_names_a_metric_that_exists(board: dict[str, Any]) -> None:
    """Ours by the watchdog's table, vLLM's by what its release gave."""
    for query in queries(board):
        names = metrics_in(re.sub(r"label_values\((.*), \w+\)", r"\1", query))
        assert names, query
        assert names <= our_names() | vllm_names(), query


def test_everything_the_watchdog_writes_is_shown(board: dict[str, Any]) -> None:
    """A metric that is added to its table belongs on the dashboard."""
    shown = set().union(*(metrics_in(query) for query in queries(board)))
    assert shown >= our_names()


def test_what_a_bench_reads_is_what_the_release_gives() -> None:
    """The names in the tools' own table, held against the same record."""
    named = {
        value
        for value in vars(engine_metrics).values()
        if isinstance(value, str) and value.startswith("vllm:")
    }
    assert len(named) > 5
    assert named <= vllm_names()


def test_the_watchdog_writes_what_its_table_says() -> None:
    """With a sample and after an intervention every name is in the text, with its kind."""
    from dsv4 import guard

    shared = watchdog.Shared(guard.Guard(), watchdog.config_of(guard.Guard().memory))
    shared.last, shared.latency_s = watchdog.Sample(1.0, 20.0, 18.0, 0.0), 0.01
    text = watchdog.metrics(shared, {"kill": 1}, "ready", 1.0)
    assert {f"dsv4_{line}" for line in re.findall(r"^# TYPE dsv4_(\w+)", text, re.M)} == our_names()


def test_every_panel_asks_the_data_source_that_was_chosen(board: dict[str, Any]) -> None:
    """A fixed one is of the machine on which the dashboard was drawn."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    (variable,) = [it for it in board["templating"]["list"] if it["type"] == "datasource"]
    assert (variable["name"], variable["query"]) == ("datasource", "prometheus")
    for panel in panels(board):
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
    for variable in board["templating"]["list"]:
        assert variable["type"] == "datasource" or variable["datasource"] == chosen


def test_every_variable_of_a_query_is_one_of_the_dashboard(board: dict[str, Any]) -> None:
    """An unknown one is sent as it is written, and matches nothing."""
    known = {variable["name"] for variable in board["templating"]["list"]}
    asked = set().union(*(re.findall(r"\$\{?(\w+)", query) for query in queries(board)))
    assert asked <= known | {"__rate_interval", "__range", "__interval"}
    assert asked >= known - {"datasource"}


def test_the_dashboard_is_one_that_grafana_loads(board: dict[str, Any]) -> None:
    """What its schema asks of a dashboard of version 39: identity, panels with a place each."""
    assert board["schemaVersion"] >= 36
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", board["uid"])
    assert board["title"]
    assert "id" not in board  # it is the database's, and an import with one is refused
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in panels(board):
        assert panel["type"] in {"timeseries", "stat", "state-timeline"}
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)


def test_panels_lie_beside_each_other(board: dict[str, Any]) -> None:
    """Within 24 columns, and none on another."""

    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        columns = range(at["x"], at["x"] + at["w"])
        return set(itertools.product(columns, range(at["y"], at["y"] + at["h"])))

    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert not taken & cells(panel), panel["title"]
        taken |= cells(panel)


OPEN = {
    "serve_host": "192.0.2.7",
    "serve_api_key": True,
    "serve_allowed_subnets": ["192.0.2.0/24"],
    "serve_tls_cert": "/etc/ssl/a.pem",
    "serve_tls_key": "/etc/ssl/a.key",
}


def scrape(**chosen: object) -> dict[str, dict[str, Any]]:
    """Return the jobs of the scrape configuration by name."""
    loaded = yaml.safe_load(service.scrape(settings.load({"route": "lab", **chosen})))
    assert loaded.keys() == {"scrape_configs"}
    return {job["job_name"]: job for job in loaded["scrape_configs"]}


def test_prometheus_is_sent_where_the_service_listens() -> None:
    """By default on loopback, in the clear and without a key."""
    jobs = scrape(serve_port=9001)
    engine = jobs["dsv4-engine"]
    assert engine["static_configs"] == [{"targets": ["127.0.0.1:9001"]}]
    assert (engine["scheme"], engine["metrics_path"]) == ("http", "/metrics")
    assert not engine.keys() & {"authorization", "tls_config"}
    assert jobs["dsv4-machine"]["static_configs"] == [{"targets": ["127.0.0.1:9100"]}]


def test_a_service_that_is_open_is_asked_with_its_key_over_tls() -> None:
    """The key is a file of Prometheus's own: the service's is root's, and in no file of ours."""
    engine = scrape(**OPEN)["dsv4-engine"]
    assert engine["scheme"] == "https"
    assert engine["static_configs"] == [{"targets": ["192.0.2.7:8899"]}]
    assert engine["authorization"] == {"credentials_file": service.PROMETHEUS_KEY}
    assert engine["tls_config"] == {"insecure_skip_verify": True}


def test_the_directory_of_the_text_file_is_named() -> None:
    """node_exporter is told where the watchdog writes."""
    text = service.scrape(settings.load({"route": "lab"})).decode()
    assert f"--collector.textfile.directory={layout.METRICS_FILE.parent}" in text
