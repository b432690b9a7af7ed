"""Prometheus' rules: each alert fires when it should and not before, has its runbook, and asks for what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import Struct

from workers.metrics.table import METRICS

ROOT = Path(__file__).parent.parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool isn't installed (Debian: apt-get install prometheus)"
)


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """All `record` or `alert` rules by name."""
    found: dict[str, dict[str, Any]] = {}
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            found |= {rule[kind]: rule for rule in group["rules"] if kind in rule}
    return found


ALERTS, RECORDS = rules("alert"), rules("record")


def metrics_in(expression: str) -> list[str]:
    """The names of ours in an expression."""
    return re.findall(r"\b(?:[a-z]+:)?bargein[a-z0-9_:]*", re.sub(r"\"[^\"]*\"", "", expression))


class Case(Struct):
    """`series` make the alert fire by `at`; with `instead` in place of those of its names they don't. `labels`: its."""

    alert: str
    series: dict[str, str]
    instead: dict[str, str]
    at: str = "5m"
    labels: dict[str, str] = {}


def histogram(name: str, below: str, fast: int, slow: int, labels: str = "") -> dict[str, str]:
    """A histogram that grows by so many under and over a bound each step."""
    more = f",{labels}" if labels else ""
    return {
        f'{name}_bucket{{le="{below}"{more}}}': f"0+{fast}x80",
        f'{name}_bucket{{le="10"{more}}}': f"0+{fast + slow}x80",
        f'{name}_bucket{{le="+Inf"{more}}}': f"0+{fast + slow}x80",
    }


HERE = 'instance="control:9464",job="bargein"'
LIVE = 'bargein_stage_workers{stage="voice",state="live"}'
USED, CAPACITY = 'bargein_slots_used{stage="voice"}', 'bargein_slots_capacity{stage="voice"}'
BUILD = 'bargein_build_info{role="maintenance"}'
FENCED, CONFIRMED = "bargein_barge_in_fenced_seconds", "bargein_barge_in_confirmed_seconds"

CASES = [
    Case("BargeinNoControlWorker", {}, {'bargein_build_info{role="control"}': "1x80"}, labels={"role": "control"}),
    Case(
        "BargeinPartitionsUnowned",
        {"bargein_partitions": "16x80", 'bargein_partitions_owned{instance="a"}': "15x80"},
        {'bargein_partitions_owned{instance="a"}': "8x80", 'bargein_partitions_owned{instance="b"}': "8x80"},
    ),
    Case(
        "BargeinCommandsWait",
        {'bargein_oldest_command_age_seconds{partition="3"}': "20x80"},
        {'bargein_oldest_command_age_seconds{partition="3"}': "20 0 20 0 20 0 20 0 20 0 20 0 0x80"},
        labels={"partition": "3"},
    ),
    Case(
        "BargeinCleanupPending",
        {'bargein_oldest_cleanup_age_seconds{kind="cancel"}': "61x80"},
        {'bargein_oldest_cleanup_age_seconds{kind="cancel"}': "59x80"},
        labels={"kind": "cancel"},
    ),
    Case("BargeinBargeInSlow", histogram(CONFIRMED, "1", 9, 1), histogram(CONFIRMED, "1", 1000, 1)),
    Case("BargeinFenceSlow", histogram(FENCED, "0.25", 9, 1), histogram(FENCED, "0.25", 1000, 1)),
    Case(
        "BargeinStageGone",
        {LIVE: "0x80", LIVE.replace("voice", "other"): "0x80"},
        {LIVE: "1x80"},
        labels={"stage": "voice"},
    ),
    Case(
        "BargeinBrakeHeld",
        {'bargein_brake_held{stage="voice"}': "1x80"},
        {'bargein_brake_held{stage="voice"}': "0x80"},
        labels={"stage": "voice"},
    ),
    Case(
        "BargeinRedisTakesNoWrites",
        {'bargein_ready_check{check="redis_writes",instance="a"}': "0x80"},
        {'bargein_ready_check{check="redis_writes",instance="b"}': "1x80"},
    ),
    Case(
        "BargeinNotReady",
        {f'bargein_ready_check{{check="owner_loops",{HERE}}}': "0x80"},
        {
            f'bargein_ready_check{{check="owner_loops",{HERE}}}': "1x80",
            f'bargein_ready_check{{check="staying",{HERE}}}': "0x80",
        },
        labels={"instance": "control:9464"},
    ),
    Case(
        "BargeinTargetDown",
        {f"up{{{HERE}}}": "0x80"},
        {f"up{{{HERE}}}": "1x80"},
        labels={"instance": "control:9464", "job": "bargein"},
    ),
    Case(
        "BargeinStageLost",
        {'bargein_stage_lives_ended_total{stage="voice",ending="fenced"}': "0x4 1x80"},
        {'bargein_stage_lives_ended_total{stage="voice",ending="fenced"}': "1x80"},
        labels={"stage": "voice", "ending": "fenced"},
    ),
    Case(
        "BargeinStageFull",
        {USED: "60x80", CAPACITY: "64x80"},
        {USED: "50x80"},
        at="10m",
        labels={"stage": "voice"},
    ),
    Case(
        "BargeinEngineRefuses",
        {
            'bargein_engine_accepts{stage="voice",instance="a"}': "0x80",
            'bargein_engine_accepts{stage="voice",instance="b"}': "0x80",
        },
        {'bargein_engine_accepts{stage="voice",instance="b"}': "1x80"},
        labels={"stage": "voice"},
    ),
    Case(
        "BargeinSlotDrift",
        {"bargein_slots_unowned": "1x80", 'bargein_slots_missing{instance="a"}': "0x80"},
        {"bargein_slots_unowned": "0x80"},
        at="10m",
    ),
    Case(
        "BargeinCleanupsFail",
        {'bargein_cleanup_failures_total{kind="end",reason="timeout"}': "0+1x80"},
        {'bargein_cleanup_failures_total{kind="end",reason="timeout"}': "7x80"},
        at="12m",
        labels={"kind": "end", "reason": "timeout"},
    ),
    Case("BargeinDeadLetters", {"bargein_dead_letters_total": "0x4 2x80"}, {"bargein_dead_letters_total": "2x80"}),
    Case(
        "BargeinEventLoopLate",
        {f"bargein_event_loop_lag_seconds{{{HERE}}}": "0.6x80"},
        {f"bargein_event_loop_lag_seconds{{{HERE}}}": "0.1x80"},
        labels={"instance": "control:9464", "job": "bargein"},
    ),
    Case(
        "BargeinSamplesOld",
        {'bargein_sample_age_seconds{sample="census"}': "121x80"},
        {'bargein_sample_age_seconds{sample="census"}': "6x80"},
        labels={"sample": "census"},
    ),
    Case(
        "BargeinUpkeepLate",
        {BUILD: "1x80", 'bargein_upkeep_age_seconds{duty="sweep_queues"}': "7300x80"},
        {'bargein_upkeep_age_seconds{duty="sweep_queues",instance="b"}': "60x80"},
        at="15m",
        labels={"duty": "sweep_queues"},
    ),
]


def check(folder: Path, files: list[str], case: Case, series: dict[str, str], *, fires: bool) -> None:
    alert = ALERTS[case.alert]
    expected = [{"exp_labels": {**case.labels, **alert["labels"]}}] if fires else []
    test = {
        "rule_files": files,
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The rules without their annotations, whose words the tool would compare as well."""
    folder = tmp_path_factory.mktemp("rules")
    files: list[str] = []
    for file in RULES:
        content = yaml.safe_load(file.read_text())
        for group in content["groups"]:
            for rule in group["rules"]:
                rule.pop("annotations", None)
        (folder / file.name).write_text(yaml.safe_dump(content))
        files.append(str(folder / file.name))
    return files


@needs_promtool
def test_promtool_has_nothing_against_the_configuration() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(PROMETHEUS / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == list(ALERTS)


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_when_it_should_and_only_then(tmp_path: Path, bare: list[str], case: Case) -> None:
    check(tmp_path, bare, case, case.series, fires=True)
    check(tmp_path, bare, case, {**case.series, **case.instead}, fires=False)


def test_every_alert_has_its_paragraph_and_every_paragraph_its_alert() -> None:
    headings = re.findall(r"^## (Bargein\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == list(ALERTS)


def test_every_alert_says_whom_it_wakes_and_what_is_the_matter() -> None:
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in {"page", "ticket"}, name
        assert len(alert["annotations"]["summary"]) > 20, name


def test_rules_ask_for_metrics_that_there_are() -> None:
    known = {metric.name for metric in METRICS}
    asked = {name for rule in (*ALERTS.values(), *RECORDS.values()) for name in metrics_in(rule["expr"])}
    for name in asked:
        plain = re.sub(r"_(bucket|sum|count)$", "", name)
        assert name in RECORDS or name in known or plain in known, name
    assert asked & set(RECORDS), "and for what is recorded"
