#!lua flags=allow-oom
-- Takes or frees a session's slot at a stage worker, or at the limit of sessions. Repeating it changes nothing, and a
-- deposed owner's late word is ignored (S75).
--
-- KEYS   1 the holder's state, 2 its slots
-- ARGV   1 'take' or 'free', 2 session, 3 incarnation, 4 owner's token number, 5 limit, or '' for a stage worker
-- returns a code; the codes are `Slot` in slots.py
local DONE, FULL, GONE, DRAINING, DEPOSED = 0, 1, 2, 3, 4
local held = redis.call('HGET', KEYS[2], ARGV[2])
local incarnation, number
if held then
  incarnation, number = string.match(held, '^(%d+) (%d+)$')
  incarnation, number = tonumber(incarnation), tonumber(number)
  if number > tonumber(ARGV[4]) then return DEPOSED end
end
if ARGV[1] == 'free' then
  if held and incarnation == tonumber(ARGV[3]) then redis.call('HDEL', KEYS[2], ARGV[2]) end
  return DONE
end
local limit = tonumber(ARGV[5])
if not limit then
  local state = redis.call('HMGET', KEYS[1], 'state', 'capacity')
  if state[1] == 'draining' then return DRAINING end
  if state[1] ~= 'live' then return GONE end
  limit = tonumber(state[2])
end
if not held and redis.call('HLEN', KEYS[2]) >= limit then return FULL end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
return DONE
