#!lua flags=allow-oom
-- Names the entry that the owner handles alone from now on, so that it is known should that be the end of the owner.
--
-- KEYS   1 owner
-- ARGV   1 token, 2 stream and entry id, or '' when the backlog is done
-- returns 1, or 0 if the partition is somebody else's by now
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], 'handling')
else
  redis.call('HSET', KEYS[1], 'handling', ARGV[2])
end
return 1
