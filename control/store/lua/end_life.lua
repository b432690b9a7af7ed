#!lua flags=allow-oom
-- Ends a stage worker's life for everyone, unless it has moved since the observer looked (S76). Keeps I2.
--
-- KEYS   1 the worker's state
-- ARGV   1 the counter that the observer saw stand still, or '' where the worker itself says goodbye
-- returns 1 if the life is over, 0 if it goes on
local state = redis.call('HMGET', KEYS[1], 'state', 'beat')
if state[1] == 'dead' or not state[1] then return 1 end
if ARGV[1] ~= '' and state[2] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'dead')
if ARGV[1] == '' then redis.call('HSET', KEYS[1], 'left', 1) end
return 1
