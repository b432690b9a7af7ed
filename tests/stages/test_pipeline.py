"""The pipeline file: what it may say, and what is said about what it may not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stages.pipeline import SHIPPED, Pipeline, PipelineError, load_pipeline, parse_pipeline

if TYPE_CHECKING:
    from pathlib import Path

STAGE: dict[str, Any] = {"name": "thinker", "engine": "parrot"}


def problems_of(**content: Any) -> list[str]:
    with pytest.raises(PipelineError) as error:
        parse_pipeline({"stages": [STAGE], **content}, "test")
    assert str(error.value).startswith("test: ")
    return list(error.value.problems)


def test_the_defaults_are_a_whole_pipeline() -> None:
    pipeline = parse_pipeline({"stages": [STAGE]}, "test")
    assert pipeline.partitions == 16
    assert pipeline.max_sessions is None
    assert pipeline.policy == "stages.policy:DefaultPolicy"
    assert pipeline.session.idle_ttl_ms == 300_000
    assert pipeline.session.disconnect_grace_ms == 30_000
    assert pipeline.session.append_timeout_ms == 10_000
    assert pipeline.session.cleanup_timeout_ms == 5_000
    assert pipeline.session.cleanup_backoff_ms == 500
    assert pipeline.session.cleanup_backoff_max_ms == 30_000
    assert pipeline.session.restart_after_ms == 60_000
    assert pipeline.session.completed_append_limit == 256
    assert pipeline.control.lease_ms == 3_000
    assert pipeline.control.heartbeat_ms == 5_000
    assert pipeline.control.heartbeat_interval_ms == 1_000
    assert pipeline.control.batch_max == 48
    assert pipeline.limits.body_bytes == 1_048_576
    assert pipeline.stages[0].capacity == 64
    assert pipeline.sampling_defaults == (None,)
    assert pipeline.final_stage_id == 0


def test_fractions_of_seconds_become_whole_milliseconds() -> None:
    session = {"cleanup_backoff_s": 0.1, "cleanup_timeout_s": 2.675, "append_timeout_s": 0.0011}
    pipeline = parse_pipeline({"stages": [STAGE], "session": session}, "test")
    assert pipeline.session.cleanup_backoff_ms == 100
    assert pipeline.session.cleanup_timeout_ms == 2675
    assert pipeline.session.append_timeout_ms == 2, "never shorter than was asked for"


def test_an_idle_ttl_of_null_means_none() -> None:
    assert parse_pipeline({"stages": [STAGE], "session": {"idle_ttl_s": None}}, "t").session.idle_ttl_ms is None


def test_a_pipeline_without_a_policy_needs_no_stages() -> None:
    pipeline = parse_pipeline({"policy": None}, "test")
    assert pipeline.stages == ()
    assert pipeline.final_stage_id == -1


def test_stages_are_found_by_name() -> None:
    pipeline = Pipeline.example()
    assert pipeline.require_stage_id("voice") == 1
    assert pipeline.find_stage_id("ears") is None
    with pytest.raises(PipelineError, match="it has thinker, voice"):
        pipeline.require_stage_id("ears")


@pytest.mark.parametrize("name", ["demo.yaml", "demo-parrot.yaml"])
def test_the_shipped_pipelines_are_valid(name: str) -> None:
    pipeline = load_pipeline(SHIPPED / name)
    assert [stage.name for stage in pipeline.stages] == ["thinker", "voice"]
    assert pipeline.partitions == 16


@pytest.mark.torch
async def test_the_demos_voice_takes_the_thinkers_frames() -> None:
    from stages.engine import load_engine  # noqa: PLC0415
    from tests.stages.ear import Ear, input_for, request_name  # noqa: PLC0415

    stage = load_pipeline(SHIPPED / "demo.yaml").stages[1]
    engine, ear = load_engine(stage.engine, stage.options), Ear()
    await engine.start(ear)
    await engine.submit(input_for(request_name(), bytes(640)))
    outputs = await ear.turn_ends(request_name())
    assert [len(output.data) for output in outputs] == [640]
    await engine.stop()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"partition": 8},
            "partition: unknown key; did you mean partitions? allowed are partitions,",
        ),
        ({"partitions": 0}, "partitions: is 0; it must be at least 1"),
        ({"partitions": "16"}, "partitions: input should be a valid integer, not text '16'"),
        ({"partitions": True}, "partitions: input should be a valid integer, not bool True"),
        ({"max_sessions": 0}, "max_sessions: is 0; it must be at least 1"),
        (
            {"session": {"ttl_s": 3}},
            "session.ttl_s: unknown key; did you mean idle_ttl_s? allowed",
        ),
        ({"session": None}, "session: must be a mapping of keys, not null"),
        ({"session": {"append_timeout_s": 0}}, "session.append_timeout_s: is 0; it must be at least 0.001"),
        ({"session": {"idle_ttl_s": float("inf")}}, "session.idle_ttl_s: input should be a finite number"),
        (
            {"session": {"idle_ttl_s": 10}},
            "session.idle_ttl_s (10) must be greater than append_timeout_s",
        ),
        ({"session": {"cleanup_backoff_s": 31}}, "session.cleanup_backoff_s (31) must not exceed"),
        (
            {"session": {"cleanup_timeout_s": 61}},
            "session.cleanup_timeout_s (61) must not exceed restart",
        ),
        (
            {"session": {"max_waiting_bytes": 1000}},
            "session.max_waiting_bytes (1000) must be at least",
        ),
        (
            {"control": {"heartbeat_s": 1.5}},
            "control.heartbeat_interval_s (1) must be at most half",
        ),
        ({"control": {"batch_max": 5000}}, "control.batch_max: is 5000; it must be at most 1000"),
        ({"limits": {"session_id_bytes": 0}}, "limits.session_id_bytes: is 0; it must be at least 1"),
        ({"policy": ""}, "policy: string should have at least 1 character"),
        ({"stages": []}, "stages: there must be at least one, unless policy is null"),
        ({"stages": {"name": "x"}}, "stages: input should be a valid tuple, not a mapping"),
        ({"stages": [7]}, "stages.0: must be a mapping of keys, not int"),
        ({"stages": [{"name": "a"}]}, "stages.0.engine: is missing"),
        (
            {"stages": [{**STAGE, "nane": 1}]},
            "stages.0.nane: unknown key; did you mean name? allowed are name,",
        ),
        ({"stages": [{**STAGE, "name": "Upper"}]}, "stages.0.name: is 'Upper'; it must match"),
        ({"stages": [STAGE, STAGE]}, "stages.1.name: 'thinker' is taken by stage 0"),
        ({"stages": [{**STAGE, "adapter": "a:b"}]}, "stages.0.adapter: must be null"),
        ({"stages": [{**STAGE, "capacity": 0}]}, "stages.0.capacity: is 0; it must be at least 1"),
        (
            {"stages": [{**STAGE, "engine": "parot"}]},
            "stages.0.engine: 'parot' is neither built in",
        ),
        (
            {"stages": [{**STAGE, "options": {"pase": 1}}]},
            "stages.0.options.pase: unknown option; allowed",
        ),
        (
            {"stages": [{**STAGE, "options": {"frame_ms": 0}}]},
            "stages.0.options.frame_ms: Expected `int`",
        ),
        (
            {"stages": [STAGE, {"name": "voice", "engine": "torch"}]},
            "stages.1.options.module: is missing",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_path_with_what_is_allowed(content: dict[str, Any], problem: str) -> None:
    problems = problems_of(**content)
    assert len(problems) == 1
    assert problem in problems[0]


def test_all_problems_are_named_at_once() -> None:
    problems = problems_of(partitions=0, colour="red", session={"idle_ttl_s": -1})
    assert [problem.split(":")[0] for problem in sorted(problems)] == [
        "colour",
        "partitions",
        "session.idle_ttl_s",
    ]


def test_a_users_own_engine_is_not_imported() -> None:
    pipeline = parse_pipeline({"stages": [{"name": "mine", "engine": "not.installed.here:Engine"}]}, "test")
    assert pipeline.stages[0].engine == "not.installed.here:Engine"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("partitions: 16\npartitions: 8\n", "the key 'partitions' is there twice"),
        ("stages: [", "is not YAML"),
        ("- 1\n", "must be a mapping of keys, not a list"),
        ("!!python/object/apply:os.getcwd []\n", "is not YAML"),
        ("", "stages: there must be at least one"),
    ],
)
def test_a_file_that_is_no_pipeline_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text)
    with pytest.raises(PipelineError) as error:
        load_pipeline(path)
    assert str(error.value).startswith(f"{path}: 1 problem\n  ")
    assert problem in error.value.problems[0]


def test_a_file_that_is_not_there_or_not_text_is_explained(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="cannot be read: No such file"):
        load_pipeline(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PipelineError, match="not UTF-8"):
        load_pipeline(tmp_path / "binary.yaml")
