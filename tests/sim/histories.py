"""Judges a session by what its producer sent, its listener saw and the engines were given: I1, I4, I5, I7, I10, I11.

Responsible for what a client can see; knows nothing of how the system works inside, but for the engines' records.
Leaves what is stored to `watch.py`. Pure. Says no with rules and sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.accounts import TERMINALS, Account, Seen, Sent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.world import World

PROMPT_S = 1.5
"""Where only another session has troubles, everybody else is answered within this (I11)."""

CLOCK_MS = 60
"""An owner knows the server's clock this well."""

# What may have happened for a session to end for a reason.
LOSSES = frozenset({"die", "stuck", "silent", "stubborn"})
LOSSES_OF_STAGES = frozenset({"kill", "pause", "stall", "isolate", "leave"})
FAILURES = frozenset({"fail", "broken", "refuse", "slow"})
# An append with one of these may have reached the model: nobody knows, or it came too late to matter.
UNSURE = frozenset({"timeout", "stale_fence", "failed_precondition", "internal"})

Found = tuple[str, str]


def judge(account: Account, world: World, *, lossy: bool) -> Iterator[Found]:
    """Rule and what is wrong."""
    for sent in account.sent.values():
        if sent.answered_s is None:
            yield "liveness", f"{sent.op} {sent.control_id} has no reply"
    if lossy:
        return
    yield from _judge_numbers(account)
    yield from _judge_fence(account)
    yield from _judge_replies(account)
    yield from _judge_terminals(account, world)
    yield from _judge_leases(account)
    yield from _judge_expiries(account, world)
    yield from _judge_appends(account, world)
    yield from _judge_outputs(account, world)
    for text in account.unheard:
        yield "liveness", text
    if world.plan.theme == "quiet" and account.session_id != "s0":
        yield from _judge_delays(account)


def _judge_numbers(account: Account) -> Iterator[Found]:
    """`n` counts from 1 in each life; 0 is for an id that has none."""
    last, alive = 0, False
    for entry in account.seen:
        if entry.n == 0:
            if alive:
                yield "n", f"0 within a life, after {last}"
            continue
        if entry.n != last + 1 and not (entry.n == 1 and not alive):
            yield "n", f"{entry.n} after {last}"
        last = entry.n
        if entry.kind == "lifecycle":
            alive = (alive or entry.body["event"] == "opened") and entry.body["event"] not in TERMINALS


def _judge_fence(account: Account) -> Iterator[Found]:
    """I1: whoever has read `interrupted`, or that a later life began, reads nothing older after it."""
    floor = (0, 0)
    for entry in account.seen:
        place = (entry.incarnation, entry.epoch)
        if entry.kind == "lifecycle" and entry.body["event"] in ("interrupted", "opened"):
            floor = max(floor, place)
        elif entry.kind == "output" and place < floor:
            yield "I1", f"output {entry.body['data']} of {place} (n {entry.n}) after {floor} was announced"


def _judge_replies(account: Account) -> Iterator[Found]:
    """I4: at least one, at most one a delivery, all the same once one was final."""
    for control_id, replies in account.replies.items():
        sent = account.sent.get(control_id)
        if sent is None:
            yield "I4", f"a reply to {control_id}, which was never sent"
            continue
        if len(replies) > sent.deliveries:
            yield "I4", f"{sent.op} {control_id} was delivered {sent.deliveries} times and has {len(replies)} replies"
        final: Seen | None = None
        for reply in replies:
            if reply.n == 0 or reply.body["accepted_fence"] is None:
                continue  # nothing lives there, and nothing is remembered
            if final is None:
                final = None if reply.body["retryable"] else reply
            elif _essence(reply) != _essence(final):
                yield "I4", f"{sent.op} {control_id} was answered {_essence(final)}, then {_essence(reply)}"


def _essence(reply: Seen) -> tuple[Any, ...]:
    return reply.body["ok"], reply.body["code"], reply.body["detail"]


def _judge_terminals(account: Account, world: World) -> Iterator[Found]:
    """I10: opened once, ended once, for a reason that there was."""
    opened: dict[int, int] = {}
    ended: dict[int, list[str]] = {}
    for entry in account.seen:
        life = entry.incarnation
        if entry.kind == "output" and life in ended:
            yield "I10", f"an output (n {entry.n}) of life {life} after its end"
        if entry.kind != "lifecycle":
            continue
        if entry.body["event"] == "opened":
            opened[life] = opened.get(life, 0) + 1
        elif entry.body["event"] in TERMINALS:
            ended.setdefault(life, []).append(str(entry.body.get("reason")))
    for life, times in opened.items():
        if times > 1:
            yield "I10", f"life {life} was opened {times} times"
        if len(ended.get(life, ())) != 1:
            yield "I10", f"life {life} was opened and has the terminal events {ended.get(life, [])}"
    for life, reasons in ended.items():
        if life not in opened:
            yield "I10", f"life {life} ended ({reasons}) and was never opened"
        for reason in reasons:
            if not _is_right(account, world, life, reason):
                yield "I10", f"life {life} ended for the reason {reason}, and there was none"


def _judge_leases(account: Account) -> Iterator[Found]:
    """D11, S9: a resume takes over just the generation that it names, and whoever names another is refused."""
    for sent in account.sent.values():
        for reply in account.replies.get(sent.control_id, ()):
            if sent.expected is None or not reply.body["ok"]:
                continue
            now = reply.body["lease_generation"]
            if now != sent.expected + (sent.op == "resume"):
                yield "lease", f"{sent.op} {sent.control_id} of generation {sent.expected} was accepted at {now}"


def _judge_expiries(account: Account, world: World) -> Iterator[Found]:
    """I10: a session does not expire by being idle while its model is heard (S32 the other way round)."""
    ttl_ms = world.plan.pipeline.session.idle_ttl_ms
    heard: dict[int, int] = {}
    for entry in account.seen:
        if entry.kind == "output":
            heard[entry.incarnation] = entry.at_ms
        elif entry.kind == "lifecycle" and entry.body.get("reason") == "idle_ttl_expired" and ttl_ms is not None:
            idle_ms = entry.at_ms - heard.get(entry.incarnation, 0)
            if entry.body["event"] in ("closing", "expired") and idle_ms < ttl_ms - CLOCK_MS:
                yield "I10", f"life {entry.incarnation} expired as idle {idle_ms} ms after an output"
                break


def _is_right(account: Account, world: World, life: int, reason: str) -> bool:
    kinds = {fault.kind for fault in world.plan.faults}
    sent = [each for each in account.sent.values() if each.fence[0] == life]
    match reason:
        case "client_close":
            return any(each.op == "close" for each in sent)
        case "stage_lost":
            return bool(kinds & LOSSES) or any(
                (fault.kind in LOSSES_OF_STAGES or fault.more.get("mode") == "last")
                and not fault.who.startswith("control")
                for fault in world.plan.faults
            )
        case "request_failed":
            return bool(kinds & FAILURES)
        case "idle_ttl_expired":
            return world.plan.pipeline.session.idle_ttl_s is not None
        case "disconnect_grace_expired":
            return any(each.op == "touch" for each in sent)
        case "operator_close":
            return life in account.dismissed
        case "command_failed":
            return sum(fault.kind == "kill" for fault in world.plan.faults) >= 3
        case _:
            return False


def _accepted(account: Account) -> dict[tuple[int, int], list[tuple[int, Sent]]]:
    """The accepted appends of each life's epochs, by their numbers."""
    found: dict[tuple[int, int], list[tuple[int, Sent]]] = {}
    for sent in account.sent.values():
        if sent.op == "append":
            numbers = {r.body["detail"]["seq"] for r in account.replies.get(sent.control_id, ()) if r.body["ok"]}
            for number in sorted(numbers)[:1]:
                found.setdefault(sent.fence[:2], []).append((number, sent))
    return {place: sorted(pairs, key=lambda pair: pair[0]) for place, pairs in found.items()}


def _judge_appends(account: Account, world: World) -> Iterator[Found]:
    """I5 and I7: numbered without gap in the order of sending, and given to the first stage just so, once each."""
    accepted = _accepted(account)
    order = {control_id: index for index, control_id in enumerate(account.sent)}
    by_tokens = {sent.tokens: sent for sent in account.sent.values() if sent.op == "append"}
    given: dict[tuple[int, int], list[Sent]] = {}
    for each in world.given:
        if each.session_id == account.session_id:
            sent = by_tokens.get(each.tokens)
            if sent is None:
                yield "I7", f"the model was given {each.tokens}, which no append holds"
            else:
                given.setdefault((each.incarnation, each.epoch), []).append(sent)
    for place, pairs in accepted.items():
        numbers = [number for number, _ in pairs]
        if numbers != list(range(1, len(numbers) + 1)):
            yield "I5", f"epoch {place}: accepted appends are numbered {numbers}"
        # One that was told to try again has lost its place.
        firm = [s for _, s in pairs if not any(r.body["retryable"] for r in account.replies[s.control_id])]
        places = [order[sent.control_id] for sent in firm]
        if places != sorted(places):
            yield "I5", f"epoch {place}: accepted in the order {[sent.control_id for sent in firm]}"
    for place in {**accepted, **given}:
        wanted = [sent.control_id for _, sent in accepted.get(place, [])]
        got = [sent.control_id for sent in given.get(place, [])]
        if got[: len(wanted)] != wanted:
            yield "I5", f"epoch {place}: accepted {wanted}, the model was given {got}"
            continue
        for control_id in got[len(wanted) :]:
            codes = {reply.body["code"] for reply in account.replies.get(control_id, ())}
            if control_id in got[: len(wanted)]:
                yield "I5", f"epoch {place}: {control_id} was given to the model again"
            elif not codes & UNSURE or account.sent[control_id].bad:
                yield "I7", f"epoch {place}: the model was given {control_id}, which was refused ({codes})"
        if len(got) > len(wanted) + 1:
            yield "I5", f"epoch {place}: beside {wanted} the model was given {got[len(wanted) :]}"


def _judge_outputs(account: Account, world: World) -> Iterator[Found]:
    """Each fence's outputs say what the model was given at it, from the beginning, in order, once."""
    said: dict[tuple[int, int, int, int], list[int]] = {}
    numbers: dict[str, int] = {}
    for entry in account.seen:
        if entry.kind != "output":
            continue
        body = entry.body
        name = f"{body['request_id']} of stage {body['stage_id']}"
        if body["seq"] <= numbers.get(name, -1):
            yield "I5", f"output {body['seq']} of {name} after {numbers[name]}"
        numbers[name] = body["seq"]
        fence = body["fence"]
        place = (fence["incarnation"], fence["epoch"], fence["turn_id"], fence["response_seq"])
        said.setdefault(place, []).extend(body["data"])
    by_tokens = {sent.tokens: sent for sent in account.sent.values() if sent.op == "append"}
    for place, tokens in said.items():
        expected: list[int] = []
        for each in world.given:
            sent = by_tokens.get(each.tokens)
            if sent is not None and sent.fence == place and each.session_id == account.session_id:
                expected += sent.tokens
        if tokens != expected[: len(tokens)]:
            yield "I5", f"at {place} {tokens} was said of {expected}"


def _judge_delays(account: Account) -> Iterator[Found]:
    """I11: nobody waits for another session's troubles, unless an engine had to be started anew."""
    lost = {entry.incarnation for entry in account.seen if entry.body.get("reason") == "stage_lost"}
    for sent in account.sent.values():
        if sent.answered_s is not None and sent.answered_s - sent.at_s > PROMPT_S:
            yield "I11", f"{sent.op} {sent.control_id} was answered after {sent.answered_s - sent.at_s:.2f} s"
        codes = [reply.body["code"] for reply in account.replies.get(sent.control_id, ())]
        if sent.fence[0] not in lost and any(code in ("timeout", "cleanup_failed") for code in codes):
            yield "I11", f"{sent.op} {sent.control_id} was answered {codes}"
