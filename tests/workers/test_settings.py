"""The settings: which value wins, what is refused and how that reads, and that no password is ever shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.pipeline import SHIPPED, Pipeline, load_pipeline
from workers import settings as module
from workers.settings import (
    PACKAGED_PIPELINE,
    SettingsError,
    find_default_pipeline,
    find_misspelt,
    load_settings,
    public_url,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("BARGEIN_"):
            monkeypatch.delenv(name)


def problems_of(**flags: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as error:
        load_settings(**flags)
    return error.value.problems


def test_nothing_set_is_a_redis_on_this_machine_and_the_shipped_pipeline() -> None:
    settings = load_settings()
    assert settings.redis == "redis://127.0.0.1:6379/0"
    assert settings.pipeline_path == SHIPPED / "demo-parrot.yaml"
    assert settings.load_pipeline().stages[0].name == "thinker"
    assert (settings.log_level, settings.log_json, settings.grace_s) == ("info", False, 30.0)


def test_a_flag_wins_over_its_variable_and_a_flag_not_given_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARGEIN_GRACE_S", "7")
    monkeypatch.setenv("BARGEIN_LOG_LEVEL", "WARNING")
    settings = load_settings(grace_s=2.5, log_level=None)
    assert (settings.grace_s, settings.log_level) == (2.5, "warning")


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARGEIN_PIPELINE", "")
    monkeypatch.setenv("BARGEIN_REDIS_URL", "")
    assert load_settings().redis == "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LOG_LEVEL", "loud", "BARGEIN_LOG_LEVEL (--log-level): is 'loud'; it must be one of debug, info, warning"),
        ("LOG_JSON", "perhaps", "BARGEIN_LOG_JSON (--log-json): is 'perhaps'; it must be true or false"),
        ("GRACE_S", "-1", "BARGEIN_GRACE_S (--grace-s): is '-1'; it must be at least 0"),
        ("GRACE_S", "86400", "BARGEIN_GRACE_S (--grace-s): is '86400'; it must be at most 3600"),
        ("GRACE_S", "nan", "BARGEIN_GRACE_S (--grace-s): is 'nan'; it must be"),
        ("GRACE_S", "soon", "BARGEIN_GRACE_S (--grace-s): is 'soon'; it must be a number"),
        ("REDIS_URL", "http://h:6379", "BARGEIN_REDIS_URL (--redis-url): must begin with redis://, rediss://, unix://"),
        ("REDIS_URL", "redis://h:port/0", "BARGEIN_REDIS_URL (--redis-url): can't be used: "),
        ("REDIS_URL", "redis+cluster://h:1,g:port", "BARGEIN_REDIS_URL (--redis-url): can't be used: "),
        ("REDIS_URL", "redis+cluster://h:1/3", "a cluster has no databases"),
        ("REDIS_URL", "redis+sentinel://h:1,g:2", "names no service; write redis+sentinel://host:port/service"),
        ("REDIS_URL", "rediss+cluster://h:1?protocol=3", "the option protocol is not open to choice"),
        ("REDIS_URL", "redis://h/0?colour=red", "unexpected keyword argument 'colour'"),
        ("REDIS_URL", "redis://h/0?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("REDIS_URL", "redis://h/0?protocol=3", "the option protocol is not open to choice"),
        (
            "REDIS_PASSWORD_FILE",
            "/nowhere/secret",
            "BARGEIN_REDIS_PASSWORD_FILE (--redis-password-file): /nowhere/secret",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"BARGEIN_{name}", value)
    (problem,) = problems_of()
    assert said in problem


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARGEIN_LOG_LEVEL", "loud")
    assert len(problems_of(grace_s=-1.0, redis_url="localhost")) == 3


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://h:1/2", "redis://:p%40ss%2F%3A%23@h:1/2"),
        ("rediss://me@h/0", "rediss://me:p%40ss%2F%3A%23@h/0"),
        ("unix:///run/redis.sock?db=1", "unix://:p%40ss%2F%3A%23@/run/redis.sock?db=1"),
        ("redis+cluster://a:1,b:2", "redis+cluster://:p%40ss%2F%3A%23@a:1,b:2"),
        ("rediss+sentinel://me@a,b:2/calls/1", "rediss+sentinel://me:p%40ss%2F%3A%23@a,b:2/calls/1"),
    ],
)
def test_the_password_of_the_file_goes_into_the_url(tmp_path: Path, url: str, whole: str) -> None:
    file = tmp_path / "secret"
    file.write_text("p@ss/:#\n")
    settings = load_settings(redis_url=url, redis_password_file=file)
    assert settings.redis == whole


def test_a_password_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BARGEIN_REDIS_URL", "redis://me:hush@h:1/2?client_name=x")
    settings = load_settings()
    assert "hush" in settings.redis
    assert "hush" not in f"{settings} {settings!r} {settings.address} {settings.model_dump_json()}"
    assert settings.address == "redis://h:1/2"
    file = tmp_path / "secret"
    file.write_text("hush too")
    problems = problems_of(redis_password_file=file)
    assert "give one of them" in problems[0]
    monkeypatch.setenv("BARGEIN_REDIS_URL", "redis://me:hush@h:port/2")
    assert "hush" not in "".join(problems_of())


@pytest.mark.parametrize("url", ["redis+cluster://me:hush@a:1,b:2", "rediss+sentinel://me:hush@a,b:2/calls?x=1"])
def test_the_address_of_several_hosts_is_shown_without_the_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("BARGEIN_REDIS_URL", url.replace("?x=1", "?health_check_interval=1"))
    settings = load_settings()
    assert settings.address == url.partition("?")[0].replace("me:hush@", "")
    assert "hush" not in f"{settings} {settings!r}"
    (problem,) = problems_of(redis_url=url)
    assert "BARGEIN_REDIS_PASSWORD_FILE" in problem
    assert "hush" not in problem


def test_a_password_in_a_flag_is_refused_since_everybody_could_read_it() -> None:
    (problem,) = problems_of(redis_url="redis://:hush@h:1/0")
    assert "BARGEIN_REDIS_PASSWORD_FILE" in problem
    assert "hush" not in problem


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"\n", "is empty"), (b"\xff", "is not UTF-8")])
def test_a_password_file_without_a_password_is_refused_at_once(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    assert said in problems_of(redis_password_file=file)[0]


def test_the_packaged_pipeline_is_the_shipped_one() -> None:
    assert PACKAGED_PIPELINE.read_bytes() == (SHIPPED / "demo-parrot.yaml").read_bytes()


def test_the_pipeline_is_found_in_an_image_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(module, "SYSTEM_PIPELINE", tmp_path / "pipeline.yaml")
    assert find_default_pipeline() == PACKAGED_PIPELINE
    (tmp_path / "pipeline.yaml").write_text("policy: null\n")
    assert find_default_pipeline() == tmp_path / "pipeline.yaml"
    assert load_settings().load_pipeline().policy is None


def test_no_pipeline_anywhere_is_said_with_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "default_pipelines", lambda: (tmp_path / "a.yaml",))
    with pytest.raises(SettingsError, match=r"BARGEIN_PIPELINE .*a\.yaml"):
        load_settings().load_pipeline()


def test_the_stage_is_one_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline(SHIPPED / "demo-parrot.yaml")
    monkeypatch.setenv("BARGEIN_STAGE", "voice")
    assert load_settings().require_stage(pipeline) == 1
    for stage, said in ((None, "is missing"), ("talker", "is 'talker'")):
        monkeypatch.delenv("BARGEIN_STAGE", raising=False)
        with pytest.raises(SettingsError, match=f"BARGEIN_STAGE .*{said}; this pipeline has thinker, voice"):
            load_settings(stage=stage).require_stage(pipeline)
    with pytest.raises(SettingsError, match="it has no stages"):
        load_settings(stage="voice").require_stage(Pipeline(policy=None))


def test_a_misspelt_variable_is_pointed_out_and_others_are_not() -> None:
    found = find_misspelt(
        {
            "BARGEIN_REDIS_ULR": "redis://h",
            "BARGEIN_REDIS_URL": "redis://h",
            "BARGEIN_REDIS_PORT": "tcp://10.0.0.1:6379",
            "BARGEIN_ENGINE": "somebody else's",
            "PATH": "/bin",
        }
    )
    assert found == ["BARGEIN_REDIS_ULR is not a setting; did you mean BARGEIN_REDIS_URL?"]


def test_an_address_for_people_keeps_only_the_place() -> None:
    assert public_url("rediss://me:hush@host:1/2?ssl_keyfile=x#y") == "rediss://host:1/2"
    assert public_url("unix://:hush@/run/redis.sock?db=1") == "unix:///run/redis.sock"


def test_the_jobs_are_with_the_sessions_unless_they_have_a_server_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret\n")
    together = load_settings(redis_url="redis://me@a:1/0", redis_password_file=file)
    assert together.jobs == together.redis == "redis://me:s3cret@a:1/0"
    assert together.jobs_address == "redis://a:1/0"
    apart = load_settings(redis_url="redis://a:1/0", jobs_url="redis://me@b:2/0", jobs_password_file=file)
    assert (apart.redis, apart.jobs) == ("redis://a:1/0", "redis://me:s3cret@b:2/0")
    assert apart.jobs_address == "redis://b:2/0"


def test_the_jobs_can_not_be_on_a_cluster_and_may_be_behind_sentinels() -> None:
    with pytest.raises(SettingsError, match="the queue of jobs can't be on a cluster; name a single server"):
        _ = load_settings(redis_url="redis+cluster://a:1").jobs
    beside = load_settings(redis_url="redis+cluster://a:1", jobs_url="redis+sentinel://b:2/jobs")
    assert beside.jobs == "redis+sentinel://b:2/jobs"
    with pytest.raises(SettingsError, match="BARGEIN_JOBS_URL"):
        load_settings(jobs_url="http://b")


def test_a_password_of_jobs_that_have_no_server_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("s3cret")
    with pytest.raises(SettingsError, match="without BARGEIN_JOBS_URL it is for nothing"):
        _ = load_settings(jobs_password_file=file).jobs
    monkeypatch.setenv("BARGEIN_JOBS_URL", "redis://u:p@b:1")
    with pytest.raises(SettingsError, match="in BARGEIN_JOBS_URL already"):
        _ = load_settings(jobs_password_file=file).jobs
