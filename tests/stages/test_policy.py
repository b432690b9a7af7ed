"""The model policy: loading, the default one, adapters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.core.fence import Fence
from stages.engine import Output
from stages.imports import ImportPathError
from stages.policy import (
    AppendPlan,
    DefaultPolicy,
    OutputAction,
    OutputDecision,
    configured_sampling,
    load_adapter,
    load_policy,
    pass_through,
)

FENCE = Fence(incarnation=0, epoch=0, turn_id=0, response_seq=0)
DEFAULTS = ({"temperature": 0.7, "top_k": 40, "seed": None}, None, {"temperature": 1.0, "voice": "low"})


def plan(payload: Any, mode: str, *, final: bool = False) -> Any:
    return (
        DefaultPolicy()
        .plan_append(
            request_id="r",
            session_id="s",
            fence=FENCE,
            session_config={},
            runtime_config={},
            seq=1,
            turn_seq=1,
            mode=mode,
            payload=payload,
            final=final,
            sampling=None,
        )
        .prompt
    )


def sampling(wanted: Any) -> tuple[Any, ...]:
    return configured_sampling(DefaultPolicy(), runtime_config={"sampling": wanted}, defaults=DEFAULTS)


class Reference(DefaultPolicy):
    """A policy that says of itself what each hook returns."""

    returned: Any = DEFAULTS

    def configure_sampling_params(self, *, runtime_config: Any, defaults: Any) -> Any:
        return self.returned

    def decide_output(self, *, stage_id: int, final_stage_id: int, output: Output) -> OutputDecision | None:
        return OutputDecision(OutputAction.DIRECT_RESPONSE, {"why": "listening"})


class WithoutDecision:
    def configure_sampling_params(self, *, runtime_config: Any, defaults: Any) -> Any: ...
    def plan_append(self, **kwargs: Any) -> Any: ...


class OldSignature(DefaultPolicy):
    def decide_output(self, *, stage_id: int, output: Output) -> None: ...  # type: ignore[override]


class Shout:
    def __call__(self, *, output: Output, **_: Any) -> AppendPlan:
        return AppendPlan(output.data.upper())


def adapter_without_keywords(output: Output) -> AppendPlan:
    return AppendPlan(output.data)


class TestSampling:
    def test_without_wishes_the_defaults_stay(self) -> None:
        assert configured_sampling(DefaultPolicy(), runtime_config={}, defaults=DEFAULTS) == DEFAULTS
        assert sampling(None) == DEFAULTS
        assert sampling({}) == DEFAULTS
        assert sampling([None, None, {}]) == DEFAULTS

    def test_a_mapping_goes_to_every_stage_that_has_the_key(self) -> None:
        assert sampling({"temperature": 0, "voice": "high", "seed": 7}) == (
            {"temperature": 0.0, "top_k": 40, "seed": 7},
            None,
            {"temperature": 0.0, "voice": "high"},
        )

    def test_a_list_goes_to_its_stages(self) -> None:
        assert sampling([{"top_k": 1}, None, {"temperature": 0.5}]) == (
            {"temperature": 0.7, "top_k": 1, "seed": None},
            None,
            {"temperature": 0.5, "voice": "low"},
        )

    def test_the_defaults_are_never_changed(self) -> None:
        sampling({"temperature": 0.1})
        assert DEFAULTS[0] == {"temperature": 0.7, "top_k": 40, "seed": None}

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            (
                {"temprature": 1},
                r"sampling\.temprature: no stage has it; allowed are seed, temperature",
            ),
            ({"top_k": 1.5}, r"sampling\.top_k: must be int, not float"),
            ({"top_k": True}, r"sampling\.top_k: must be int, not bool"),
            ({"temperature": "hot"}, r"sampling\.temperature: must be float, not str"),
            ({"temperature": float("nan")}, r"sampling\.temperature: must be finite"),
            ({"temperature": 10**400}, r"sampling\.temperature: must be float, not int"),
            ([{}], "has 1 elements, one for each of 3 stages"),
            ([{}, {"x": 1}, {}], r"sampling\[1\]\.x: unknown; no stage has any"),
            ([{}, None, {"top_k": 1}], r"sampling\[2\]\.top_k: unknown; allowed are temperature, voice"),
            ([7, None, None], r"sampling\[0\]: must be a mapping"),
            ("hot", "must be a mapping or a list of mappings"),
        ],
    )
    def test_a_wish_that_no_stage_can_meet_is_refused_by_its_path(self, wanted: Any, message: str) -> None:
        with pytest.raises((ValueError, TypeError), match=message):
            sampling(wanted)

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (list(DEFAULTS), "as a tuple"),
            (DEFAULTS[:2], "for 3 stages, not 2"),
            ((7, None, {}), "stage 0 are a int, the default is a dict"),
        ],
    )
    def test_a_policy_that_returns_something_else_is_refused(self, returned: Any, message: str) -> None:
        policy = Reference()
        policy.returned = returned
        with pytest.raises((ValueError, TypeError), match=message):
            configured_sampling(policy, runtime_config={}, defaults=DEFAULTS)


class TestPlanAppend:
    @pytest.mark.parametrize("payload", [b"ab", {"audio": b"ab"}])
    def test_audio_passes_through(self, payload: Any) -> None:
        assert plan(payload, "append_audio_chunk") == payload

    @pytest.mark.parametrize("payload", [[1, 2], {"tokens": [1]}])
    def test_tokens_pass_through_and_may_come_as_messagepack(self, payload: Any) -> None:
        assert plan(payload, "append_tokens") == payload
        assert plan(msgspec.msgpack.encode(payload), "append_tokens") == payload

    @pytest.mark.parametrize("payload", [None, b"", [], b"ab", [1], {"audio": b"ab"}])
    def test_a_commit_takes_anything_and_nothing(self, payload: Any) -> None:
        assert plan(payload, "turn_commit_only") == payload

    @pytest.mark.parametrize("mode", ["append_audio_chunk", "append_tokens"])
    @pytest.mark.parametrize("payload", [None, b"", []])
    def test_only_a_final_input_may_be_empty(self, payload: Any, mode: str) -> None:
        assert plan(payload, mode, final=True) == payload
        with pytest.raises(ValueError, match="holds nothing"):
            plan(payload, mode)

    @pytest.mark.parametrize(
        ("payload", "mode", "message"),
        [
            ([1], "append_audio_chunk", "needs audio, and this holds tokens"),
            ({"audio": b"ab"}, "append_tokens", "needs tokens, and this holds audio"),
            (b"\xc1", "append_tokens", "must be MessagePack"),
            (b"\xa3abc", "append_tokens", "not str"),
            ("text", "append_audio_chunk", "not str"),
            ([1, None], "append_tokens", r"tokens\[1\]"),
            ({"video": b""}, "turn_commit_only", "not keys"),
            (b"ab", "replace_latest_chunk", "does not know 'replace_latest_chunk'"),
            (b"ab", "smell", "does not know 'smell'"),
        ],
    )
    def test_a_payload_that_its_mode_does_not_allow_is_refused(self, payload: Any, mode: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plan(payload, mode, final=True)


class TestLoading:
    @pytest.mark.parametrize("path", ["stages.policy:DefaultPolicy", "stages.policy.DefaultPolicy"])
    def test_a_policy_is_loaded_by_either_spelling(self, path: str) -> None:
        assert isinstance(load_policy(path, DEFAULTS), DefaultPolicy)

    def test_a_policy_of_ones_own_may_decide_about_outputs(self) -> None:
        policy = load_policy(f"{__name__}:Reference", DEFAULTS)
        output = Output(request_id="r", fence=FENCE, kind="text", data="hm")
        decision = policy.decide_output(stage_id=0, final_stage_id=1, output=output)
        assert decision == OutputDecision(OutputAction.DIRECT_RESPONSE, {"why": "listening"})

    @pytest.mark.parametrize(
        ("path", "kind", "message"),
        [
            ("no_such_package:Policy", ImportPathError, "no module"),
            (f"{__name__}:WithoutDecision", TypeError, "no method decide_output"),
            (f"{__name__}:OldSignature", TypeError, "final_stage_id"),
        ],
    )
    def test_a_policy_without_the_hooks_is_refused(self, path: str, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            load_policy(path)

    def test_a_policy_with_sampling_of_the_wrong_shape_is_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="for 1 stages, not 3"):
            load_policy(f"{__name__}:Reference", ({},))


class TestAdapters:
    def adapted(self, path: str | None) -> Any:
        output = Output(request_id="r0", fence=FENCE, kind="text", data="hm", turn_end=True)
        return load_adapter(path)(
            request_id="r1",
            session_id="s",
            stage_id=1,
            fence=FENCE,
            seq=0,
            output=output,
            session_config={},
            runtime_config={},
        ).prompt

    def test_the_default_passes_the_chunk_through(self) -> None:
        assert load_adapter(None) is pass_through
        assert self.adapted(None) == "hm"

    def test_a_class_or_a_function_is_loaded_by_path(self) -> None:
        assert self.adapted(f"{__name__}:Shout") == "HM"
        assert self.adapted("stages.policy:pass_through") == "hm"

    @pytest.mark.parametrize("path", [f"{__name__}:adapter_without_keywords", f"{__name__}:DEFAULTS"])
    def test_what_cannot_be_called_so_is_refused(self, path: str) -> None:
        with pytest.raises(TypeError, match="adapter"):
            load_adapter(path)
