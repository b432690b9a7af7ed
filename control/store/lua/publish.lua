#!lua
-- Delivers a stage worker's outputs: each to its session's listener, or as input to the route's next stage.
-- The check against the fence and the delivery are one step, so nothing old can follow an accepted cancel (I1, S36).
--
-- KEYS   1 fences, 2 marks, 3 heard, 4 outputs, 5 fenced, then the streams that the outputs go to
-- ARGV   1 worker id, 2 half of an events stream's allowed bytes, then an output each:
--        session, stream (position in KEYS), target ('events' or 'submissions'), request id, incarnation, epoch, turn,
--        response, number, body, payload (submissions only, else '')
-- returns a code an output; the codes are `Published` in publishing.py

local DELIVERED, DUPLICATE, DROPPED, STOP = 0, 1, 2, 3
local WIDTH = 11
local count = (#ARGV - 2) / WIDTH
local codes = {}

if redis.call('SISMEMBER', KEYS[5], ARGV[1]) == 1 then
  for o = 1, count do codes[o] = STOP end
  return codes
end

local half_bytes = tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local fences, marks, last, heard = {}, {}, {}, {}

for o = 1, count do
  local i = 3 + (o - 1) * WIDTH
  local sid, request = ARGV[i], ARGV[i + 3]
  local incarnation, epoch = tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
  local turn, response, number = tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7]), tonumber(ARGV[i + 8])
  if fences[sid] == nil then
    local text = redis.call('HGET', KEYS[1], sid)
    local fence = false
    if text then
      fence = {}
      for part in string.gmatch(text, '%d+') do fence[#fence + 1] = tonumber(part) end
    end
    fences[sid] = fence
  end
  -- incarnation, floor, then accepted and offered as epoch, turn, response
  local f = fences[sid]
  local code
  if not f or f[1] ~= incarnation or epoch < f[2] then
    code = STOP
  elseif epoch > f[6] or (epoch == f[6] and (turn > f[7] or response > f[8]) and
      not (epoch == f[3] and turn <= f[4] and response <= f[5])) then
    code = DROPPED
  elseif epoch < f[3] or (epoch == f[3] and (turn < f[4] or response < f[5])) then
    code = DROPPED
  else
    if last[request] == nil then last[request] = tonumber(redis.call('HGET', KEYS[4], request) or '-1') end
    if number <= last[request] then
      code = DUPLICATE
    else
      local key = KEYS[tonumber(ARGV[i + 1])]
      if ARGV[i + 2] == 'events' then
        if marks[sid] == nil then marks[sid] = read_mark(redis.call('HGET', KEYS[2], sid)) end
        append_event(key, marks[sid], 'output', ARGV[i + 9], half_bytes)
      else
        redis.call('XADD', key, '*', 'b', ARGV[i + 9], 'p', ARGV[i + 10])
      end
      last[request] = number
      heard[sid] = true
      code = DELIVERED
    end
  end
  codes[o] = code
end

for request, number in pairs(last) do redis.call('HSET', KEYS[4], request, number) end
for sid, mark in pairs(marks) do redis.call('HSET', KEYS[2], sid, write_mark(mark)) end
for sid in pairs(heard) do redis.call('HSET', KEYS[3], sid, now_ms) end
return codes
