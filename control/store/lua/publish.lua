#!lua
-- Delivers a stage worker's outputs: each to its session's listener, or as input to the route's next stage.
-- The check against the fence and the delivery are one step, so nothing old can follow an accepted cancel (I1, S36).
-- One Redis call reads or writes a hash for all outputs; what is left is one XADD for each.
--
-- KEYS   1 fences, 2 marks, 3 heard, 4 outputs, 5 fenced, then the streams that the outputs go to
-- ARGV   1 worker id, 2 half of an events stream's allowed bytes, then at most 1,000 outputs, each:
--        session, stream (position in KEYS), target ('events' or 'submissions'), request id, incarnation, epoch, turn,
--        response, number, body, payload (submissions only, else '')
-- returns a code an output; the codes are `Published` in publishing.py

local DELIVERED, DUPLICATE, DROPPED, STOP, UNDELIVERABLE = 0, 1, 2, 3, 4
local WIDTH = 11
local count = (#ARGV - 2) / WIDTH
local codes = {}

if redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 then
  for o = 1, count do codes[o] = STOP end
  return codes
end

local half_bytes = tonumber(ARGV[2])
local sids, requests, known = {}, {}, {}
for o = 1, count do
  local i = 3 + (o - 1) * WIDTH
  local sid, request = ARGV[i], ARGV[i + 3]
  if not known['s' .. sid] then
    known['s' .. sid] = true
    sids[#sids + 1] = sid
  end
  if not known['r' .. request] then
    known['r' .. request] = true
    requests[#requests + 1] = request
  end
end

-- incarnation, floor, then accepted and offered as epoch, turn, response
local fences, last, marks = {}, {}, {}
local texts = redis.call('HMGET', KEYS[1], unpack(sids))
for s = 1, #sids do
  if texts[s] then
    local fence = {}
    for part in string.gmatch(texts[s], '%d+') do fence[#fence + 1] = tonumber(part) end
    fences[sids[s]] = fence
  end
end
local numbers = redis.call('HMGET', KEYS[4], unpack(requests))
for r = 1, #requests do last[requests[r]] = tonumber(numbers[r] or '-1') end
texts = redis.call('HMGET', KEYS[2], unpack(sids))
for s = 1, #sids do marks[sids[s]] = read_mark(texts[s]) end

local delivered, marked, heard = {}, {}, {}
for o = 1, count do
  local i = 3 + (o - 1) * WIDTH
  local sid, request = ARGV[i], ARGV[i + 3]
  local incarnation, epoch = tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
  local turn, response, number = tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7]), tonumber(ARGV[i + 8])
  local f = fences[sid]
  local code
  if not f or f[1] ~= incarnation or epoch < f[2] then
    code = STOP
  elseif not (epoch == f[3] and turn <= f[4] and response <= f[5]) and
      not (epoch == f[6] and turn <= f[7] and response <= f[8]) then
    code = DROPPED
  elseif epoch == f[3] and (turn < f[4] or response < f[5]) then
    code = DROPPED
  elseif number <= last[request] then
    code = DUPLICATE
  else
    local key, ok = KEYS[tonumber(ARGV[i + 1])], nil
    -- A key of another type must not end the script half way, with outputs delivered and not counted (S78).
    if ARGV[i + 2] == 'events' then
      ok = pcall(append_event, key, marks[sid], 'output', ARGV[i + 9], half_bytes)
      marked[sid] = ok or marked[sid]
    else
      ok = pcall(redis.call, 'XADD', key, '*', 'b', ARGV[i + 9], 'p', ARGV[i + 10])
    end
    if ok then
      last[request] = number
      delivered[request] = number
      heard[sid] = true
      code = DELIVERED
    else
      code = UNDELIVERABLE
    end
  end
  codes[o] = code
end

local function write(key, values, to_text)
  local flat = {}
  for name, value in pairs(values) do
    flat[#flat + 1] = name
    flat[#flat + 1] = to_text(name, value)
  end
  if #flat > 0 then redis.call('HSET', key, unpack(flat)) end
end

local time = redis.call('TIME')
local now_ms = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
write(KEYS[4], delivered, function(_, number) return string.format('%.0f', number) end)
write(KEYS[2], marked, function(sid) return write_mark(marks[sid]) end)
write(KEYS[3], heard, function() return now_ms end)
return codes
