#!lua flags=allow-oom
-- Takes a partition if nobody holds it: a new token, above the last one and above the server's clock, so that no
-- failover can hand out the same one twice (S79).
--
-- KEYS   1 owner
-- ARGV   1 worker id, 2 lease (ms), 3 random id of this acquisition
-- returns { 1, token, revision, now ms, 1 if the last holder did not hand over, the entry that it was handling alone then
--         or '', in how many such crashes it was the same } or { 0, holder, until ms, now ms }
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local held = redis.call('HMGET', KEYS[1], 'holder', 'until_ms', 'number', 'revision')
local holder, until_ms = held[1] or '', tonumber(held[2] or '0')
if holder ~= '' and holder ~= ARGV[1] and until_ms > now_ms then return {0, holder, until_ms, now_ms} end
local number = math.max(tonumber(held[3] or '0') + 1, now_ms)
local token = string.format('%.0f:%s', number, ARGV[3])
redis.call('HSET', KEYS[1], 'token', token, 'number', string.format('%.0f', number), 'holder', ARGV[1],
  'until_ms', string.format('%.0f', now_ms + tonumber(ARGV[2])))
redis.call('HSETNX', KEYS[1], 'revision', 0)
local unclean = holder ~= '' and 1 or 0
-- Only what was being handled alone when an owner died is under suspicion, and only while that goes on (S83).
local named = redis.call('HMGET', KEYS[1], 'handling', 'suspect')
local handling, crashes = named[1] or '', 0
if unclean == 1 and handling ~= '' then
  if named[2] ~= handling then redis.call('HSET', KEYS[1], 'suspect', handling, 'crashes', 0) end
  crashes = redis.call('HINCRBY', KEYS[1], 'crashes', 1)
else
  handling = ''
  redis.call('HDEL', KEYS[1], 'suspect', 'crashes')
end
redis.call('HDEL', KEYS[1], 'handling')
return {1, token, tonumber(held[4] or '0'), now_ms, unclean, handling, crashes}
