#!lua flags=allow-oom
-- Who shares out the partitions: says that a control worker lives, or leaves, and who else does.
--
-- KEYS   1 controls
-- ARGV   1 worker id, 2 how long it may be silent (ms); 0 leaves
-- returns { now ms, when the first of the others will have been silent for too long (ms; 0: there are none),
--         worker ids ... }
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl_ms = tonumber(ARGV[2])
if ttl_ms == 0 then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  redis.call('ZADD', KEYS[1], now_ms + ttl_ms, ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
local first = redis.call('ZRANGE', KEYS[1], 0, 1, 'WITHSCORES')
local next_ms = 0
for i = #first - 1, 1, -2 do
  if first[i] ~= ARGV[1] then next_ms = tonumber(first[i + 1]) end
end
return {now_ms, next_ms, unpack(redis.call('ZRANGE', KEYS[1], 0, -1))}
