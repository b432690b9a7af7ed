#!lua flags=allow-oom
-- Keeps a partition for another lease, or gives it up.
--
-- KEYS   1 owner
-- ARGV   1 token, 2 lease (ms); 0 gives up
-- returns the server's time in ms, or 0 if the partition is somebody else's by now
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local lease_ms = tonumber(ARGV[2])
if lease_ms == 0 then
  redis.call('HSET', KEYS[1], 'holder', '', 'until_ms', 0)
else
  redis.call('HSET', KEYS[1], 'until_ms', string.format('%.0f', now_ms + lease_ms))
end
return now_ms
