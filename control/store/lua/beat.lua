#!lua flags=allow-oom
-- A stage worker's heartbeat: a counter that moves, and its load. A life that is over stays over (S40), and one that
-- the server has forgotten is over too (S50). A worker that an operator wants emptied is `draining`, whatever it says.
--
-- KEYS   1 the worker's state, 2 there if it is to be emptied
-- ARGV   1 how long the records are kept after the last beat (ms), then field, value, ...
-- returns the counter, negative if it is to be emptied, or 0 if this life is over
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'dead' then return 0 end
if #ARGV > 1 then redis.call('HSET', KEYS[1], unpack(ARGV, 2)) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
local drains = redis.call('PEXPIRE', KEYS[2], ARGV[1]) == 1
if drains then redis.call('HSET', KEYS[1], 'state', 'draining') end
local counter = redis.call('HINCRBY', KEYS[1], 'beat', 1)
return drains and -counter or counter
