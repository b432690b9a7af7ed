#!lua flags=allow-oom
-- Takes or frees a session's slot at a stage worker, or at the limit of sessions. Repeating it changes nothing, and a
-- deposed owner's late word is ignored (S75): once a partition's newer owner has spoken here, the older ones can't, not
-- even about a session that has left meanwhile.
--
-- KEYS   1 the holder's state, 2 its slots, 3 each partition's highest token number, and its owner's last call
-- ARGV   1 'take' or 'free', 2 session, 3 incarnation, 4 owner's token number, 5 limit, or '' for a stage worker,
--        6 partition, 7 a number that rises with every call of this owner
-- returns a code; the codes are `Slot` in slots.py. Keeps I6 and I9.
local DONE, FULL, GONE, DRAINING, DEPOSED = 0, 1, 2, 3, 4
local OWNERS_MS = 86400000
-- Former words of the owner's own, too: one whose answer was lost is said again, and may still arrive itself over the
-- connection that was given up, when the session has left and come back meanwhile.
local newest, called = string.match(redis.call('HGET', KEYS[3], ARGV[6]) or '', '^(%d+) ?(%d*)$')
newest, called = tonumber(newest or 0), tonumber(called) or 0
local token, call = tonumber(ARGV[4]), tonumber(ARGV[7])
if newest > token or (newest == token and called >= call) then return DEPOSED end
local held = redis.call('HGET', KEYS[2], ARGV[2])
local limit = tonumber(ARGV[5])
if ARGV[1] == 'take' then
  if not limit then
    local state = redis.call('HMGET', KEYS[1], 'state', 'capacity', 'accepts')
    if state[1] == 'draining' then return DRAINING end
    if state[1] ~= 'live' then return GONE end
    limit = tonumber(state[2]) or 0
    -- Its engine is short of something that slots don't count; whoever has one keeps it.
    if not held and tonumber(state[3] or '1') == 0 then return FULL end
  end
  if not held and redis.call('HLEN', KEYS[2]) >= limit then return FULL end
end
redis.call('HSET', KEYS[3], ARGV[6], ARGV[4] .. ' ' .. ARGV[7])
redis.call('PEXPIRE', KEYS[3], OWNERS_MS)
if ARGV[1] == 'take' then
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
elseif held and string.match(held, '^(%d+) ') == ARGV[3] then
  redis.call('HDEL', KEYS[2], ARGV[2])
end
return DONE
