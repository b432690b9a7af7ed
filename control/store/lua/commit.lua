#!lua flags=allow-oom
-- Records what the owner of a partition has decided for a batch of inputs: all of it, or nothing.
--
-- Everything that may refuse comes before the first write, since Redis does not roll back. Arguments are grouped in
-- sections, one Redis call a section where that is possible: calls are what a commit costs.
--
-- KEYS   1 owner, 2 commands, 3 acks, 4 dead, 5 sessions, 6 fences, 7 cleanups, 8 deadlines, 9 marks, 10 heard,
--        11 outputs, 12 strangers, 13 fenced, 14 orders, then the sessions' and workers' keys that the sections name by
--        position
-- ARGV   1 token, 2 revision decided on, 3 half of an events stream's allowed bytes, 4 types of KEYS 15.. (a letter
--        each: s stream, l list), then the sections, each a count and that many groups:
--        guards      session, heard (ms)         refuse if an output was delivered after that
--        sources     command id                  refuse if somebody has deleted it: its payload is gone (S55)
--        fenced      worker                      lives that are over for this partition
--        states      session, state              forgets     session
--        fences      session, record             unfences    session
--        cleanups    session, cleanups           cleaned     session
--        deadlines   due (ms), session           undue       session
--        begins      session, events, answers    a life begins: its streams live on, its count starts anew
--        submissions queue, command id or '', body, payload     the payload moves here from the command, if named
--        aborts      queue, submissions queue, body
--        answers     list, entry                 trims       list, number
--        events      session, stream, kind, body
--        strangers   session, stream, body       replies to ids without a session: bounded in number and time
--        ends        session, events, answers
--        released    request id
--        dead        stream (2, 3 or 14), entry id, reason, 1 if its body may hold a token: it is not kept then
--        commands    entry id                    acks        entry id         orders      entry id   inputs to delete
-- returns { status, revision, server time in ms, detail }; the statuses are `CommitStatus` in commits.py
-- Keeps I1, I4, I5, I6.

local COMMITTED, LOST_OWNERSHIP, STALE_REVISION, HEARD_SINCE, WRONG_TYPE, MISSING = 0, 1, 2, 3, 4, 5
local EVENTS_KEPT, ENDED_MS = 64, 300000
local STRANGERS_KEPT, STRANGER_MS, STRANGER_EVENTS = 1000, 60000, 64
local DEAD_KEPT, DEAD_BYTES = 10000, 4096
local FENCED_MS = 86400000
local FIXED, CHUNK = 14, 4000
local TYPES = {s = 'stream', l = 'list'}
local STREAMS = {['2'] = 'commands', ['3'] = 'acks', ['14'] = 'orders'}

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local held = redis.call('HMGET', KEYS[1], 'token', 'revision')
if held[1] ~= ARGV[1] then return {LOST_OWNERSHIP, 0, now_ms, held[1] or ''} end
local revision = tonumber(held[2] or '0')
if revision ~= tonumber(ARGV[2]) then return {STALE_REVISION, revision, now_ms, ''} end

local half_bytes = tonumber(ARGV[3])
local at = 5

-- The section's groups as one flat list of `width` values a group, from ARGV[from] to ARGV[to].
local function section(width)
  local count = tonumber(ARGV[at])
  local from = at + 1
  at = from + count * width
  return from, at - 1
end

local function call_with(command, key, from, to)
  for start = from, to, CHUNK do
    redis.call(command, key, unpack(ARGV, start, math.min(start + CHUNK - 1, to)))
  end
end

local guards, guards_to = section(2)
for i = guards, guards_to, 2 do
  local heard = redis.call('HGET', KEYS[10], ARGV[i])
  if heard and tonumber(heard) > tonumber(ARGV[i + 1]) then return {HEARD_SINCE, revision, now_ms, ARGV[i]} end
end
local payloads = {}
local sources, sources_to = section(1)
for i = sources, sources_to do
  local entry = redis.call('XRANGE', KEYS[2], ARGV[i], ARGV[i])[1]
  if not entry then return {MISSING, revision, now_ms, ARGV[i]} end
  payloads[ARGV[i]] = ''
  for f = 1, #entry[2], 2 do
    if entry[2][f] == 'p' then payloads[ARGV[i]] = entry[2][f + 1] end
  end
end
local types = ARGV[4]
for i = 1, #types do
  local found = redis.call('TYPE', KEYS[FIXED + i]).ok
  if found ~= 'none' and found ~= TYPES[string.sub(types, i, i)] then
    return {WRONG_TYPE, revision, now_ms, KEYS[FIXED + i]}
  end
end

-- From here on nothing refuses.
redis.call('HSET', KEYS[1], 'revision', revision + 1)

local from, to = section(1)
call_with('SADD', KEYS[13], from, to)
if from <= to then redis.call('PEXPIRE', KEYS[13], FENCED_MS) end
from, to = section(2)
call_with('HSET', KEYS[5], from, to)
from, to = section(1)
call_with('HDEL', KEYS[5], from, to)
from, to = section(2)
call_with('HSET', KEYS[6], from, to)
from, to = section(1)
call_with('HDEL', KEYS[6], from, to)
from, to = section(2)
call_with('HSET', KEYS[7], from, to)
from, to = section(1)
call_with('HDEL', KEYS[7], from, to)
from, to = section(2)
call_with('ZADD', KEYS[8], from, to)
from, to = section(1)
call_with('ZREM', KEYS[8], from, to)

from, to = section(3)
for i = from, to, 3 do
  redis.call('HDEL', KEYS[9], ARGV[i])
  redis.call('HDEL', KEYS[10], ARGV[i])
  redis.call('PERSIST', KEYS[tonumber(ARGV[i + 1])])
  redis.call('PERSIST', KEYS[tonumber(ARGV[i + 2])])
end

from, to = section(4)
for i = from, to, 4 do
  redis.call('XADD', KEYS[tonumber(ARGV[i])], '*', 'b', ARGV[i + 2], 'p', payloads[ARGV[i + 1]] or ARGV[i + 3])
end

from, to = section(3)
for i = from, to, 3 do
  -- Nothing unread in the queue: no submission can follow this abort. Else the last one names the point.
  local last = redis.call('XREVRANGE', KEYS[tonumber(ARGV[i + 1])], '+', '-', 'COUNT', 1)[1]
  redis.call('XADD', KEYS[tonumber(ARGV[i])], '*', 'b', ARGV[i + 2], 'a', last and last[1] or '0-0')
end

from, to = section(2)
for i = from, to, 2 do redis.call('RPUSH', KEYS[tonumber(ARGV[i])], ARGV[i + 1]) end
from, to = section(2)
for i = from, to, 2 do redis.call('LTRIM', KEYS[tonumber(ARGV[i])], tonumber(ARGV[i + 1]), -1) end

from, to = section(4)
if from <= to then
  local sids, marks = {}, {}
  for i = from, to, 4 do
    if not marks[ARGV[i]] then
      marks[ARGV[i]] = true
      sids[#sids + 1] = ARGV[i]
    end
  end
  for start = 1, #sids, CHUNK do
    local stored = redis.call('HMGET', KEYS[9], unpack(sids, start, math.min(start + CHUNK - 1, #sids)))
    for s = 1, #stored do marks[sids[start + s - 1]] = read_mark(stored[s]) end
  end
  for i = from, to, 4 do
    append_event(KEYS[tonumber(ARGV[i + 1])], marks[ARGV[i]], ARGV[i + 2], ARGV[i + 3], half_bytes)
  end
  local flat = {}
  for s = 1, #sids do
    flat[2 * s - 1] = sids[s]
    flat[2 * s] = write_mark(marks[sids[s]])
  end
  for start = 1, #flat, CHUNK do
    redis.call('HSET', KEYS[9], unpack(flat, start, math.min(start + CHUNK - 1, #flat)))
  end
end

from, to = section(3)
if from <= to then
  redis.call('ZREMRANGEBYSCORE', KEYS[12], '-inf', now_ms)
  local room = STRANGERS_KEPT - redis.call('ZCARD', KEYS[12])
  for i = from, to, 3 do
    local known = redis.call('ZSCORE', KEYS[12], ARGV[i])
    if known or room > 0 then
      if not known then room = room - 1 end
      local key = KEYS[tonumber(ARGV[i + 1])]
      redis.call('XADD', key, 'MAXLEN', STRANGER_EVENTS, '*', 't', 'reply', 'n', 0, 'b', ARGV[i + 2])
      if redis.call('PTTL', key) < STRANGER_MS then redis.call('PEXPIRE', key, STRANGER_MS) end
      redis.call('ZADD', KEYS[12], now_ms + STRANGER_MS, ARGV[i])
    else
      redis.call('HINCRBY', KEYS[1], 'unheard', 1)
    end
  end
  redis.call('PEXPIRE', KEYS[12], STRANGER_MS)
end

from, to = section(3)
for i = from, to, 3 do
  redis.call('HDEL', KEYS[9], ARGV[i])
  redis.call('HDEL', KEYS[10], ARGV[i])
  local events, answers = KEYS[tonumber(ARGV[i + 1])], KEYS[tonumber(ARGV[i + 2])]
  redis.call('XTRIM', events, 'MAXLEN', EVENTS_KEPT)
  redis.call('PEXPIRE', events, ENDED_MS)
  redis.call('PEXPIRE', answers, ENDED_MS)
end

from, to = section(1)
call_with('HDEL', KEYS[11], from, to)

from, to = section(4)
for i = from, to, 4 do
  local entry = redis.call('XRANGE', KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 1])[1]
  local body = ''
  local fields = entry and ARGV[i + 3] == '0' and entry[2] or {}
  for f = 1, #fields, 2 do
    if fields[f] == 'b' then body = string.sub(fields[f + 1], 1, DEAD_BYTES) end
  end
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', DEAD_KEPT, '*', 'reason', ARGV[i + 2],
    'stream', STREAMS[ARGV[i]], 'entry', ARGV[i + 1], 'b', body)
  redis.call('XDEL', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
end

from, to = section(1)
call_with('XDEL', KEYS[2], from, to)
from, to = section(1)
call_with('XDEL', KEYS[3], from, to)
from, to = section(1)
call_with('XDEL', KEYS[14], from, to)

return {COMMITTED, revision + 1, now_ms, ''}
