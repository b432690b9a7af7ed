"""What any durable loop costs: read a stream, decode, and one script that writes a state, a reply, and deletes.

And the bare relay: one process between two streams. `python -m bench.bare loop|relay URL`. The control worker is
measured against both.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from control.store.link import Link, make_pool

LOOP = """
for i = 1, #ARGV, 4 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  redis.call('XADD', 'bare:events:' .. ARGV[i], '*', 't', 'reply', 'b', ARGV[i + 2])
  redis.call('XDEL', KEYS[1], ARGV[i + 3])
end
"""


async def loop(url: str) -> None:
    """Every input is a command, every command one state and one reply."""
    pool = make_pool(url)
    link = Link(pool)
    sha = await link.call("SCRIPT", "LOAD", LOOP)
    decode, encode = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode
    state = b"x" * 200
    last = "0-0"
    print("ready", flush=True)
    while True:
        answer = await link.call("XREAD", "COUNT", 48, "BLOCK", 1000, "STREAMS", "bare:in", last)
        if not answer:
            continue
        argv: list[bytes] = []
        for entry_id, fields in answer[0][1]:
            command = decode(fields[1])
            reply = encode({"control_id": command["control_id"], "ok": True, "fence": command["fence"], "detail": None})
            argv += (command["session_id"], state, reply, entry_id)
            last = entry_id.decode()
        await link.call("EVALSHA", sha, 2, "bare:in", "bare:states", *argv)


async def relay(url: str) -> None:
    """In, and out again."""
    link = Link(make_pool(url))
    last = "0-0"
    print("ready", flush=True)
    while True:
        answer = await link.call("XREAD", "COUNT", 48, "BLOCK", 1000, "STREAMS", "bare:relay", last)
        for entry_id, fields in answer[0][1] if answer else ():
            last = entry_id.decode()
            await link.call("XADD", "bare:relayed", "*", "b", fields[1])


async def sink(url: str) -> None:
    """The end of the relay: prints what arrived and when."""
    link = Link(make_pool(url))
    last = "0-0"
    print("ready", flush=True)
    while True:
        answer = await link.call("XREAD", "COUNT", 48, "BLOCK", 1000, "STREAMS", "bare:relayed", last)
        for entry_id, fields in answer[0][1] if answer else ():
            last = entry_id.decode()
            print(fields[1].decode(), time.monotonic(), flush=True)


if __name__ == "__main__":
    asyncio.run({"loop": loop, "relay": relay, "sink": sink}[sys.argv[1]](sys.argv[2]))
